"""Asynchronous saving: the state is copied into memory, and another process writes it while the training goes on.

The call lasts only as long as the copy. The memory is kept from save to save, is allocated in advance and is pinned where
there is a GPU. Later changes of the state do not change the copy. One save is in progress at a time; the next one waits for
it. An error is raised by the next call.
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
"""Waiting longer than this (seconds) for the save before is reported."""


class Snapshot(Protocol):
    """A state to be copied."""

    size: int

    def fill(self, memory: "Memory") -> None:
        """Copy everything into the memory, synchronously."""


class Memory:
    """Memory that the training and the writer process share. It only grows. Without memfd (macOS) it is not shared."""

    def __init__(self) -> None:
        self.fd: Optional[int] = None
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("stoker-checkpoint", os.MFD_CLOEXEC)
        self.map: Optional[mmap.mmap] = None
        self.size = 0
        self.pinned: Any = None
        """Set by the code that pins the memory: unpins it, before it is mapped at another address."""

    def reserve(self, size: int) -> mmap.mmap:
        """Map at least so many bytes and touch every page: the first access to a page costs many times its copy."""
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
    """One per process. Calls may come from any thread, one at a time. A signal handler that interrupts a save finds `busy`
    and has to save synchronously."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._memory: Optional[Memory] = None
        self._writer: Optional[_Writer] = None
        self._pending: Optional[str] = None
        self._error: Optional[Exception] = None
        self.last: Optional[str] = None
        """Path of the newest checkpoint that was completed."""

    @property
    def busy(self) -> bool:
        """Whether the calling thread is in the middle of a save."""
        return self._owner == threading.get_ident()

    @property
    def pending(self) -> Optional[str]:
        """Name of the checkpoint that is being written."""
        return self._pending

    def save(self, snapshot: Snapshot, request: Dict[str, Any]) -> None:
        """Copy the state, send the request and return. Raises the error of the save before."""
        with self._lock:
            self._owner = threading.get_ident()
            try:
                self.wait()
                if self._memory is None:
                    self._memory = Memory()
                self._memory.reserve(snapshot.size)
                snapshot.fill(self._memory)
                self._send({**request, "memory": self._memory.size, "env": run_info.identity()})
            finally:
                self._owner = 0

    def wait(self) -> None:
        """Wait for the save in progress. Raises its error, once."""
        self.settle()
        error = self.take_error()
        if error is not None:
            raise error

    def settle(self) -> None:
        """Wait for the save in progress, and keep its error for the next call."""
        began = time.monotonic()
        while self._pending is not None and self._writer is not None:
            # A signal handler may have read the answer meanwhile, so each wait is short.
            answer = self._writer.answer(0.5)
            if answer is not None:
                self._receive(answer)
        if self.busy and time.monotonic() - began > SLOW:
            run_info.warn(
                "slow",
                f"checkpoint: the training waited {time.monotonic() - began:.1f} s for the save before; save less often",
            )

    def take_error(self) -> Optional[Exception]:
        error, self._error = self._error, None
        return error

    def finish(self) -> None:
        """Complete the save in progress and end the writer, at the end of the process."""
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
        """The saver of a forked child: it does not take over the parent's save."""
        if self._writer is not None:
            self._writer.abandon()
        if self._memory is not None:
            self._memory.close()
        return Saver()

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._memory is not None
        if self._writer is None:
            self._writer = _start(self._memory)
        self._pending = request["name"]
        try:
            self._writer.ask(request, self._memory)
        except OSError:
            # The writer died since the last save (out of memory, killed by hand).
            self._writer.close()
            self._writer = _start(self._memory)
            self._writer.ask(request, self._memory)

    def _receive(self, answer: Mapping[str, Any]) -> None:
        name, self._pending = self._pending, None
        if answer.get("error") is not None:
            message = f"checkpoint {name} could not be written: {answer['error']}"
            number = answer.get("errno")
            self._error = RuntimeError(message) if number is None else OSError(number, message)
        elif answer.get("path"):
            self.last = answer["path"]
        if answer.get("ended") and self._writer is not None:
            self._writer.close()
            self._writer = None


class _Writer:
    """The writer process, as the training sees it."""

    def __init__(self, memory: Memory) -> None:
        import subprocess  # lazy: it imports much, and most scripts do not need it

        assert memory.fd is not None
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        # The child inherits the mask, so a signal to the process group cannot end it while it starts.
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
        self._received = b""

    def ask(self, request: Mapping[str, Any], memory: Memory) -> None:
        self._in.write(json.dumps(request).encode() + b"\n")
        self._in.flush()

    def answer(self, timeout: float) -> Optional[Dict[str, Any]]:
        """The answer of the writer; None if there is none within the time."""
        if not select.select([self._out], [], [], timeout)[0]:
            return None
        data = os.read(self._out, 65536)
        if not data:
            return {"error": f"the writer process ended with {self._process.wait()}", "ended": True}
        self._received += data
        if not self._received.endswith(b"\n"):
            return None
        answer, self._received = self._received, b""
        found: Dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        """Close its input, after which it ends by itself, and wait for it."""
        try:
            self._in.close()
        except OSError:
            pass  # The writer is dead; the unread data is lost with it.
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def abandon(self) -> None:
        """In a forked child: close the pipe, or the writer would not notice the end of the parent."""
        self._in.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process.returncode = 0


class _WriterThread(_Writer):
    """A writer for systems where memory cannot be shared or no process can be started. It takes the interpreter's lock
    at times, which delays the training."""

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
        from stoker.sdk.writer_process import (
            answer,
        )  # lazy: it imports the package, which imports this module

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
        return _WriterThread()
    try:
        return _Writer(memory)
    except OSError as exc:
        run_info.warn("writer", f"checkpoint: written by a thread, because no process can be started ({exc})")
        return _WriterThread()


_saver = Saver()


def saver() -> Saver:
    """The saver of this process."""
    return _saver


def _after_fork() -> None:
    global _saver
    _saver = _saver.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _saver.finish())
