"""Finds the user's own server, or starts it.

One lock decides which process is the server of a home; the server holds it while it lives. A command that finds no
server takes a second lock, which lets one command start the server while the others wait. So any number of commands
may race, and a crash leaves nothing to clean up: the kernel releases the locks of a dead process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from stoker.client.api import Client
from stoker.errors import ServerUnreachable, SpecError, StokerError
from stoker.linux.descriptors import Closing
from stoker.linux.process import boot_id, start_time

if TYPE_CHECKING:
    from pathlib import Path

    from stoker.settings import Home

START_LIMIT = 60.0
"""Seconds that a server may take to start: it may open a big database on a slow disk."""
LOG_LIMIT = 10 << 20
ALREADY_RUNNING = 75
"""Exit status of a server that found the lock taken."""
_POLL = 0.01
_TAIL = 20
_REPORT = 3
"""The descriptor on which a starting server reports why it cannot start."""


def connect(home: Home, autostart: bool = True) -> Client:
    """A client of this user's server. STOKER_URL and STOKER_TOKEN name another one instead."""
    url = os.environ.get("STOKER_URL")
    if url:
        return Client(url, _remote_token())
    record = serving(home)
    if record is None:
        if not autostart:
            raise ServerUnreachable("the server does not run", hint="Start it with `stoker server start`.")
        record = start(home)
    return Client(str(record["url"]), read_token(home))


def running(home: Home) -> dict[str, Any] | None:
    """server.json of this home's server if exactly that process lives, else None."""
    try:
        record = json.loads(home.server_record.read_bytes())
        alive = start_time(int(record["pid"])) == record["start_time"] and record["boot_id"] == boot_id()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if alive else None


def serving(home: Home) -> dict[str, Any] | None:
    """The same, but None for a server that is about to end."""
    record = running(home)
    return None if record is None or record.get("stopping") else record


def start(home: Home) -> dict[str, Any]:
    """Starts the server of this home and waits until it listens. A server that another command starts will do too."""
    log, turn, offset = _open_files(home)
    report, reports = os.pipe()
    os.set_blocking(report, False)
    try:
        deadline = time.monotonic() + START_LIMIT
        mine = False
        pid = 0
        while time.monotonic() < deadline:
            record = serving(home)
            if record is not None:
                return record
            mine = mine or _locks(turn)
            status = _ended(pid) if pid else None
            if status not in (None, ALREADY_RUNNING):
                raise _not_started(home, _read(report), offset, status)
            if status == ALREADY_RUNNING:
                pid = 0
            if mine and pid == 0 and not locked(home):
                # No process holds the server's lock, not even one that is ending.
                pid = _spawn(home, log, reports)
            time.sleep(_POLL)
    finally:
        for fd in (log, turn, report, reports):
            os.close(fd)
    raise ServerUnreachable(
        f"the server did not start within {START_LIMIT:.0f} seconds", hint=f"See {home.server_log}."
    )


def read_token(home: Home) -> str:
    try:
        return home.token.read_text().strip()
    except OSError as exc:
        raise StokerError(
            f"cannot read the token in {home.token}: {(exc.strerror or str(exc)).lower()}",
            hint="Stop the server with its pid from server.json; the next command makes a new token.",
        ) from exc


def _remote_token() -> str:
    token = os.environ.get("STOKER_TOKEN", "").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise SpecError("STOKER_URL is set but STOKER_TOKEN is not a token", hint="Set both, or neither.")
    return token


def _open_files(home: Home) -> tuple[int, int, int]:
    """The log, the lock of the command that starts the server, and the offset of the new server's lines in the log."""
    try:
        home.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            if home.server_log.stat().st_size > LOG_LIMIT:
                home.server_log.replace(home.server_log.with_name("server.log.1"))
        log = os.open(home.server_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # One of many commands starts the server and the others wait: many interpreters that start only to find the
        # lock taken would slow down the one that counts.
        turn = os.open(home.root / "starting.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise _unusable(home, exc) from exc
    return log, turn, os.fstat(log).st_size


def _unusable(home: Home, exc: OSError) -> StokerError:
    from stoker import disks  # lazy: only for the error

    return disks.refusal(exc, home.root) or StokerError(
        f"cannot use the home {str(home.root)!r}: {(exc.strerror or str(exc)).lower()}",
        hint="Make it writable, or set STOKER_HOME to a directory that is.",
        details={"home": str(home.root)},
    )


def _spawn(home: Home, log: int, reports: int) -> int:
    """Starts a server that outlives this process: a session of its own, output to the log, no terminal. It reports to
    `reports` why it cannot start, because the log may be on a full disk."""
    argv = [sys.executable, "-P", "-m", "stoker.server", "--home", str(home.root), "--report", str(_REPORT)]
    environ = _environment()
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, log, 1),
        (os.POSIX_SPAWN_DUP2, log, 2),
        (os.POSIX_SPAWN_DUP2, reports, _REPORT),
    ]
    try:
        return os.posix_spawn(sys.executable, argv, environ, file_actions=actions, setsid=True)
    except NotImplementedError:
        # The C library lacks it; the server then makes its own session.
        return os.posix_spawn(sys.executable, argv, environ, file_actions=actions, setpgroup=0)


def _environment() -> dict[str, str]:
    """The environment of the server, which outlives this shell: without variables that look like secrets, and without
    directories in which a script's `queue.py` would replace Python's."""
    from stoker.client.record import looks_secret  # lazy: only needed to start a server

    environ = {
        name: value for name, value in os.environ.items() if not looks_secret(name) and name != "STOKER_URL"
    }
    package = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))  # noqa: PTH118, PTH120
    paths = environ.pop("PYTHONPATH", "").split(os.pathsep)
    if any(os.path.realpath(path) == package for path in paths if path):
        environ["PYTHONPATH"] = package
    return environ


def _ended(pid: int) -> int | None:
    """Exit status of the child process; None while it runs."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return ALREADY_RUNNING
    return os.waitstatus_to_exitcode(status) if done else None


def locked(home: Home) -> bool:
    """Whether a server holds the lock of this home."""
    try:
        fd = os.open(home.server_lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    with Closing(fd):
        return not _locks(fd)


def _locks(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _read(report: int) -> str:
    try:
        return os.read(report, 1 << 16).decode(errors="replace")
    except BlockingIOError:
        return ""


def _not_started(home: Home, reported: str, offset: int, status: int | None) -> StokerError:
    lines = tail(home.server_log, offset)
    reported_lines = [
        line.removeprefix("stoker: ")
        for line in (*lines, *reported.splitlines())
        if line.startswith("stoker: ")
    ]
    text = reported_lines[-1] if reported_lines else lines[-1] if lines else f"it ended with status {status}"
    message, _, hint = text.partition(" hint: ")
    return StokerError(
        f"the server did not start: {message}",
        hint=hint or f"See {home.server_log}.",
        details={"log": lines, "status": status},
    )


def tail(path: Path, offset: int = 0, lines: int = _TAIL) -> list[str]:
    """The last lines of a log after `offset`."""
    try:
        with path.open("rb") as handle:
            end = handle.seek(0, os.SEEK_END)
            handle.seek(max(offset if offset <= end else 0, end - 65536))
            return handle.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
