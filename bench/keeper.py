"""Ends every process that a peer starts.

Daemons detach from their parent. If no process reaps them, their zombies slow down every program that lists
processes. So each peer runs below a keeper, a small process that inherits and reaps the orphans of its
descendants. It ends all of them when the benchmark closes its end of a pipe, also after a crash of the
benchmark. Run by path, on the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

PR_SET_CHILD_SUBREAPER = 36
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""


class Kept:
    """A command below a keeper, from `with` to its end. Its output goes to the file `log`."""

    def __init__(
        self, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self.argv = list(argv)
        self.log = log
        self._env = env
        self._cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Kept:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *self.argv],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._env,
                cwd=self._cwd,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=GRACE * 3)

    @property
    def pid(self) -> int:
        """The keeper's process id; all other processes are below it."""
        assert self._process is not None
        return self._process.pid

    def check(self) -> None:
        """Raises with the last lines of its log if it has ended."""
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            raise RuntimeError(f"{self.argv[0]} ended with status {status}: {self.last_words()}")

    def last_words(self) -> str:
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace").strip()[-600:]
        return ""


def keep(argv: Sequence[str]) -> int:
    """Run `argv` until it ends or stdin closes, then end all descendants. Returns its exit status."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become a subreaper")
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    stdin = os.open(os.devnull, os.O_RDONLY)
    actions = [(os.POSIX_SPAWN_DUP2, stdin, 0)]
    child = os.posix_spawnp(
        argv[0], list(argv), os.environ, file_actions=actions, setsigdef=[signal.SIGINT, signal.SIGHUP]
    )
    status = None
    while status is None:
        readable, _, _ = select.select([0, woken], [], [])
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)
        status = _collect(child)
        if 0 in readable and not os.read(0, 1):
            break
    if status is None:
        os.kill(child, signal.SIGTERM)
    ended = _end_all(child)
    return status if status is not None else (ended or 0)


def _collect(child: int) -> int | None:
    """Reap the processes that have ended; the exit status of `child` if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, raw = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                status = os.waitstatus_to_exitcode(raw)
    return status


def _end_all(child: int) -> int | None:
    """Wait until no descendant is left. After the grace they are killed, repeatedly as orphans arrive."""
    deadline = time.monotonic() + GRACE
    status = None
    while True:
        found = _collect(child)
        status = found if found is not None else status
        children = _children()
        if not children:
            return status
        for pid in children:
            # Orphans get SIGTERM too: their parent may have ended without passing it on.
            late = time.monotonic() > deadline
            with contextlib.suppress(ProcessLookupError):
                if late or pid != child:
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.05)


def _children() -> list[int]:
    raw = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(word) for word in raw.split()]


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
