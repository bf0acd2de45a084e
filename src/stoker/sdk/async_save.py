"""Saving while the training goes on: the state is copied aside, and another process writes it.

The call lasts as long as the copy into memory that is kept from save to save: touched before, and pinned where
there is a GPU. What the training does to its state afterwards does not reach the copy. One save is under way at a
time; the next one waits for it. What went wrong is raised by the next call.
"""

from __future__ import annotations

import atexit
import json
import mmap
import os
import select
import signal
import sys
import threading
import time
from typing import Any, Dict, Mapping, Optional, Protocol

from stoker.sdk import run_info

_ROUND = 2 << 20
_POPULATE = getattr(mmap, "MAP_POPULATE", 0x8000)
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from stoker.sdk.writer_process import main; main()"
SLOW = 1.0
"""Seconds of waiting for the save before that are worth a word."""


class Snapshot(Protocol):
    """A state that is about to be copied."""

    size: int

    def fill(self, memory: "Memory") -> None:
        """Copy everything into the memory; it is complete when this returns."""


class Memory:
    """Memory that both processes see. It only grows. Without memfd (macOS) it belongs to this process alone."""

    def __init__(self) -> None:
        self.fd: Optional[int] = None
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("stoker-checkpoint", os.MFD_CLOEXEC)
        self.map: Optional[mmap.mmap] = None
        self.size = 0
        self.pinned: Any = None
        """For whoever pins it: what has to be undone before it moves."""

    def reserve(self, size: int) -> mmap.mmap:
        """At least so many bytes, every page of them touched: the first touch costs many times the copy."""
        if self.map is None or self.size < size:
            if self.pinned is not None:
                self.pinned()
                self.pinned = None
            self.map, self.size = None, 0
            size = -(-max(size, 1) // _ROUND) * _ROUND
            if self.fd is None:
                self.map = mmap.mmap(-1, size)
            else:
                os.posix_fallocate(self.fd, 0, size)
                self.map = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | _POPULATE)
            self.size = size
        return self.map

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class Saver:
    """One per process. Calls may come from any thread, one at a time; a signal handler that saves while the code
    it interrupted does finds `busy` and has to save by itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._memory: Optional[Memory] = None
        self._writer: Optional[_Writer] = None
        self._pending: Optional[str] = None
        self._error: Optional[Exception] = None
        self.last: Optional[str] = None
        """The newest checkpoint that was put in its place."""

    @property
    def busy(self) -> bool:
        """Whether this very thread is in the middle of a save."""
        return self._owner == threading.get_ident()

    @property
    def pending(self) -> Optional[str]:
        """The name of what is being written."""
        return self._pending

    def save(self, snapshot: Snapshot, request: Dict[str, Any]) -> None:
        """Copy the state, hand it over and return. Raises what went wrong with the save before."""
        with self._lock:
            self._owner = threading.get_ident()
            try:
                self.wait()
                if self._memory is None:
                    self._memory = Memory()
                self._memory.reserve(snapshot.size)
                snapshot.fill(self._memory)
                self._hand_over({**request, "memory": self._memory.size, "env": run_info.identity()})
            finally:
                self._owner = 0

    def wait(self) -> None:
        """Until nothing is under way. Raises what went wrong with it, once."""
        self.settle()
        error = self.take_error()
        if error is not None:
            raise error

    def settle(self) -> None:
        """The same, and what went wrong is kept for the next call."""
        began = time.monotonic()
        while self._pending is not None and self._writer is not None:
            # A signal handler may have taken the answer meanwhile: so never for long without looking.
            said = self._writer.answer(0.5)
            if said is not None:
                self._take_in(said)
        if self.busy and time.monotonic() - began > SLOW:
            run_info.warn(
                "slow",
                f"checkpoint: the training waited {time.monotonic() - began:.1f} s for the save before; save less often",
            )

    def take_error(self) -> Optional[Exception]:
        error, self._error = self._error, None
        return error

    def finish(self) -> None:
        """At the end of the process: what is under way is written first."""
        self.settle()
        error = self.take_error()
        if error is not None:
            run_info.warn("save", f"checkpoint: {error}")
        if self._writer is not None:
            self._writer.close()
        if self._memory is not None:
            self._memory.close()
        self._writer = self._memory = None

    def forked(self) -> "Saver":
        """The saver of a child: what the parent has under way is none of its business."""
        if self._writer is not None:
            self._writer.abandon()
        if self._memory is not None:
            self._memory.close()
        return Saver()

    def _hand_over(self, request: Mapping[str, Any]) -> None:
        assert self._memory is not None
        if self._writer is None:
            self._writer = _start(self._memory)
        self._pending = request["name"]
        try:
            self._writer.ask(request, self._memory)
        except OSError:
            # It died since the last save (out of memory, killed by hand): another one is started.
            self._writer.close()
            self._writer = _start(self._memory)
            self._writer.ask(request, self._memory)

    def _take_in(self, said: Mapping[str, Any]) -> None:
        name, self._pending = self._pending, None
        if said.get("error") is not None:
            message = f"checkpoint {name} could not be written: {said['error']}"
            number = said.get("errno")
            self._error = RuntimeError(message) if number is None else OSError(number, message)
        elif said.get("path"):
            self.last = said["path"]
        if said.get("ended") and self._writer is not None:
            self._writer.close()
            self._writer = None


class _Writer:
    """The process that writes."""

    def __init__(self, memory: Memory) -> None:
        import subprocess  # it loads a good deal, and most scripts do not need it

        assert memory.fd is not None
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        # It inherits what is blocked: not even while it starts does a signal meant for the training end it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, root, str(memory.fd)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(memory.fd,),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout.fileno()
        self._said = b""

    def ask(self, request: Mapping[str, Any], memory: Memory) -> None:
        self._in.write(json.dumps(request).encode() + b"\n")
        self._in.flush()

    def answer(self, timeout: float) -> Optional[Dict[str, Any]]:
        """What it said, None if nothing within the time."""
        if not select.select([self._out], [], [], timeout)[0]:
            return None
        data = os.read(self._out, 65536)
        if not data:
            return {"error": f"the process that writes it ended with {self._process.wait()}", "ended": True}
        self._said += data
        if not self._said.endswith(b"\n"):
            return None
        said, self._said = self._said, b""
        found: Dict[str, Any] = json.loads(said)
        return found

    def close(self) -> None:
        """It ends by itself when there is nothing more to come."""
        try:
            self._in.close()
        except OSError:
            pass  # It is gone, and with it what was not read.
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def abandon(self) -> None:
        """In a forked child: let go of the pipe, or the process would not see its parent's end."""
        self._in.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process.returncode = 0


class _Thread(_Writer):
    """Where memory cannot be shared, or no process be started: a thread. Python code then waits for it now and then."""

    def __init__(self) -> None:
        self._thread: Optional[threading.Thread] = None
        self._result: Optional[Dict[str, Any]] = None

    def ask(self, request: Mapping[str, Any], memory: Memory) -> None:
        assert memory.map is not None
        self._thread = threading.Thread(
            target=self._work, args=(request, memory.map), name="stoker-checkpoint"
        )
        self._thread.start()

    def _work(self, request: Mapping[str, Any], memory: mmap.mmap) -> None:
        from stoker.sdk.writer_process import answer  # it needs the package that needs this module

        self._result = json.loads(answer(request, memory))

    def answer(self, timeout: float) -> Optional[Dict[str, Any]]:
        assert self._thread is not None
        self._thread.join(timeout)
        return None if self._thread.is_alive() else self._result

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        pass


def _start(memory: Memory) -> _Writer:
    if memory.fd is None or not sys.executable:
        return _Thread()
    try:
        return _Writer(memory)
    except OSError as exc:
        run_info.warn("writer", f"checkpoint: written by a thread, no process can be started for it ({exc})")
        return _Thread()


_saver = Saver()


def saver() -> Saver:
    """This process's."""
    return _saver


def _after_fork() -> None:
    global _saver
    _saver = _saver.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _saver.finish())
