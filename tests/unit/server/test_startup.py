"""The server locks a home, and keeps secrets out of its log."""

from __future__ import annotations

import errno
import logging
import stat
import threading
from pathlib import Path

import pytest

from stoker.errors import DiskFull, Refused, StokerError
from stoker.server import startup
from stoker.server.log_redaction import HIDDEN, RedactingFormatter, ServerRedactor, redactor
from stoker.settings import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_the_token_is_made_once_and_is_private(home: Home) -> None:
    token = startup.token_of(home)
    assert len(token) >= 40 and startup.token_of(home) == token
    home.token.chmod(0o644)
    startup.token_of(home)
    assert stat.S_IMODE(home.token.stat().st_mode) == 0o600
    home.token.write_text("  \n")
    assert startup.token_of(home) not in ("", token)


def test_invalid_tokens(home: Home) -> None:
    home.token.write_bytes(b"\xff\xfe")
    with pytest.raises(StokerError, match="cannot read the token"):
        startup.token_of(home)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_any_token_on_loopback(host: str) -> None:
    startup.check_exposure(host, "x")


def test_a_strong_token_anywhere() -> None:
    startup.check_exposure("0.0.0.0", "kX9-strong-enough-token-of-a-server")
    for weak in ("", "short", "a" * 40, "abcabcabcabcabcabcabcabcabc"):
        with pytest.raises(Refused, match="weak token"):
            startup.check_exposure("0.0.0.0", weak)


def test_one_lock(home: Home) -> None:
    import os

    first = startup.take_lock(home)
    with pytest.raises(startup.AlreadyRunning):
        startup.take_lock(home)
    threading.Timer(0.05, os.close, [first]).start()
    os.close(startup.take_lock(home))


def test_a_full_disk_is_named(home: Home) -> None:
    error = startup.unusable(home, OSError(errno.ENOSPC, "No space left on device"))
    assert isinstance(error, DiskFull) and str(home.root) in error.message
    assert (
        "read-only file system"
        in startup.unusable(home, OSError(errno.EROFS, "Read-only file system")).message
    )


def test_unavailable_ports() -> None:
    with startup.bind("127.0.0.1", 0) as taken, pytest.raises(StokerError, match="is taken"):
        startup.bind("127.0.0.1", taken.getsockname()[1])
    for host, port in (("127.0.0.1", 99999), ("256.0.0.1", 0), ("no.such.host.invalid", 0)):
        with pytest.raises(StokerError, match="cannot listen"):
            startup.bind(host, port)


def test_secrets_do_not_reach_the_log() -> None:
    redactor.hide(["hunter2-hunter2", "short"])
    try:
        raise RuntimeError("the secret was hunter2-hunter2")
    except RuntimeError as exc:
        record = logging.LogRecord(
            "x",
            logging.ERROR,
            "f",
            1,
            "Authorization: Bearer %s",
            ("abcdefghijklmnop",),
            (type(exc), exc, exc.__traceback__),
        )
    text = RedactingFormatter().format(record)
    assert "hunter2" not in text and "abcdefghijklmnop" not in text and text.count(HIDDEN) >= 2


def test_values_within_values_and_short_ones() -> None:
    own = ServerRedactor()
    own.hide(["abcdefgh", "abcdefgh-and-more", "1"])
    assert own.clean("abcdefgh-and-more abcdefgh 1") == f"{HIDDEN} {HIDDEN} 1"
    for n in range(10_005):
        own.hide([f"value-{n:06d}"])
    assert own.clean("value-010004") == HIDDEN and own.clean("value-000001") == "value-000001"
