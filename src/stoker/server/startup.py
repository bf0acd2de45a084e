"""Takes a home: directory, lock, log, token, socket, server.json.

The order matters. The lock comes first: it decides which process is the server. The socket is bound before
server.json is written, so a client that reads server.json can connect. Its request waits in the socket until the
server accepts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import hashlib
import json
import logging
import logging.handlers
import os
import re
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Any

from stoker import __version__, disks
from stoker.errors import Refused, StokerError
from stoker.linux.process import boot_id, start_time
from stoker.server.log_redaction import RedactingFormatter
from stoker.server.security import is_loopback
from stoker.settings import Home
from stoker.task.formats import write_json

SHORTEST_TOKEN = 24
LOG_BYTES = 10 << 20
_LOCK_TRIES = 30
_REPLICA = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}")
_WEAK = frozenset({"token", "secret", "password", "changeme", "stoker", "admin", "test"})


class AlreadyRunning(StokerError):
    """Another server holds the lock of this home."""

    code = "already-running"
    exit_code = 75


def prepare(home: Home) -> None:
    """Makes the home, readable by its owner only."""
    try:
        home.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for directory in _private(home):
            directory.mkdir(exist_ok=True, mode=0o700)
            directory.chmod(0o700)
        for file in (home.ledger, home.database, home.config):
            if file.is_file() and not file.is_symlink():
                file.chmod(0o600)
        probe = home.root / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as exc:
        raise unusable(home, exc) from exc


def _private(home: Home) -> tuple[Path, ...]:
    """Directories that only the owner may read. Not the home itself: it may be a directory of the user that holds
    other things too."""
    return home.blobs, home.runs, home.tasks, home.backups, home.engine, home.cache, home.setups


def take_lock(home: Home) -> int:
    """The lock, held while the descriptor is open. A process that only checks it holds it for a moment, so one refusal
    does not count."""
    try:
        fd = os.open(home.server_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise unusable(home, exc) from exc
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
            continue
        return fd
    os.close(fd)
    raise AlreadyRunning(f"another server already uses the home {str(home.root)!r}")


def still_locked(home: Home, lock: int) -> bool:
    """Whether the held lock is still the file that other servers would lock."""
    return _same_file(lock, home.server_lock)


def tune_garbage_collector() -> None:
    """Makes Python collect cyclic garbage less often. With ten thousand live runs a full collection stops the server
    for a quarter of a second, every ten seconds under load. Hardly any object of the server is in a cycle.
    Everything loaded by now stays for good and is exempt from collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)


def log_to(home: Home) -> None:
    """Logs to server.log, rotated, and to stderr unless that is the same file."""
    formatter = RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handlers: list[logging.Handler] = [
        logging.handlers.RotatingFileHandler(
            home.server_log, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8"
        )
    ]
    if not _same_file(sys.stderr.fileno(), home.server_log):
        handlers.append(logging.StreamHandler())
    for handler in handlers:
        handler.setFormatter(formatter)
    with contextlib.suppress(OSError):
        home.server_log.chmod(0o600)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.captureWarnings(True)


def token_of(home: Home) -> str:
    """The token of this home. The first start makes it."""
    try:
        token = home.token.read_text().strip()
        if token:
            home.token.chmod(0o600)
            return token
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as exc:
        raise StokerError(
            f"cannot read the token in {home.token}: {exc}", hint="Delete the file; a new one is made."
        ) from exc
    token = secrets.token_urlsafe(32)
    temporary = home.root / f".token.{os.getpid()}"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as handle:
            handle.write(token + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(home.token)
    except OSError as exc:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise unusable(home, exc, home.token) from exc
    return token


def check_exposure(host: str, token: str) -> None:
    """Refuses a weak token beyond loopback, where it alone protects this account."""
    if is_loopback(host):
        return
    if len(token) < SHORTEST_TOKEN or token.lower() in _WEAK or len(set(token)) < 8:
        raise Refused(
            f"refusing to listen on {host!r} with a weak token",
            hint=f"Put at least {SHORTEST_TOKEN} random characters into the token file, or delete it: a new one is made.",
        )


def check_name(home: Home) -> None:
    """Refuses a server name that cannot be part of file names."""
    if home.replica and not _REPLICA.fullmatch(home.replica):
        raise Refused(
            f"STOKER_REPLICA={home.replica[:80]!r} cannot be a server's name",
            hint="Letters, digits, dots and dashes, at most 63.",
        )


def check_sharing(home: Home, *, shared: bool) -> None:
    """Refuses several servers on a database file: they need a database that decides which one leads."""
    if home.replica and not shared:
        raise Refused(
            f"the server {home.replica!r} would be one of several, but their database is a file in the home",
            hint="Unset STOKER_REPLICA, or move to PostgreSQL: stoker server migrate --to postgresql://...",
        )


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)
    except (OSError, OverflowError) as exc:
        sock.close()
        raise _not_bound(host, port, exc) from exc
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def write_record(home: Home, url: str, started_at: float, *, stopping: bool = False) -> None:
    """Writes server.json. `stopping`: the server is about to end, and clients should not use it."""
    record: dict[str, Any] = {
        "pid": os.getpid(),
        "start_time": start_time(os.getpid()),
        "boot_id": boot_id(),
        "url": url,
        "version": __version__,
        "started_at": started_at,
    }
    if stopping:
        record["stopping"] = True
    write_json(str(home.server_record), record, mode=0o600)


def is_recorded(home: Home, url: str) -> bool:
    """Whether server.json names this server. It may have been deleted or overwritten."""
    try:
        record = json.loads(home.server_record.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("pid") == os.getpid() and record.get("url") == url


def home_id(home: Home) -> str:
    """An id that tells homes apart without naming them."""
    return hashlib.sha256(os.fsencode(home.root)).hexdigest()[:16]


def unusable(home: Home, exc: OSError, path: Path | None = None) -> StokerError:
    """`path`: the file that was to be written, if known."""
    return disks.refusal(exc, path or home.root) or StokerError(
        f"cannot use the home {str(home.root)!r}: {(exc.strerror or str(exc)).lower()}",
        hint="Make it a writable directory, or set STOKER_HOME to one.",
    )


def _not_bound(host: str, port: int, exc: OSError | OverflowError) -> StokerError:
    if isinstance(exc, OSError) and exc.errno == errno.EADDRINUSE:
        return StokerError(
            f"port {port} on {host} is taken", hint="Choose another with --port, or 0 for any free one."
        )
    if isinstance(exc, OSError) and exc.errno == errno.EACCES:
        return StokerError(
            f"port {port} on {host} is not allowed for this user", hint="Choose one above 1023."
        )
    return StokerError(f"cannot listen on {host!r} port {port}: {exc}", hint="Check --host and --port.")


def _same_file(fd: int, path: Path) -> bool:
    try:
        one, two = os.fstat(fd), path.stat()
    except OSError:
        return False
    return (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino)
