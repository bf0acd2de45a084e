"""The fork server: starts launchers in a millisecond, from an interpreter that has loaded them already.

    python -m stoker.launcher.forkserver.server --fd N [--bundle PATH]

Descriptor N is one end of a stream socket pair. Requests and answers are JSON lines:

    {"id": 1, "directory": "/abs", "pid_namespace": true, "user_namespace": false, "cover": {...},
     "record": "/abs/file", "task": {...}}
    {"id": 1, "pid": 4711, "start_time": 123, "boot_id": "...", "error": null, "taken": false}

How a fork becomes a launcher is in `starting`. Launchers outlive the fork server and the server.
`record` is the file in which the launcher is recorded, with `task` in it, outside its directory.
`cover` says what no task may see (`covering.cover`), where it has a mount namespace of its own.
A launcher does nothing before it is recorded: if anything fails on the way, nothing has been started.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import select
import signal
import sys
from typing import Any, Dict, List, Optional

from stoker.launcher import bundle
from stoker.launcher.forkserver import child
from stoker.linux import syscalls
from stoker.task import formats


class Waiting:
    """A fork that has not reported yet."""

    def __init__(self, request: Dict[str, Any], pid: int, go: Optional[int]) -> None:
        self.id = request.get("id")
        self.record = str(request.get("record"))
        self.task = request.get("task")
        self.pid = pid
        self.go = go
        """Where the launcher waits for its signal to go; None: the intermediate sees to that."""
        self.said = b""


class ForkServer:
    """One thread, no children but intermediates; ends when its socket does."""

    def __init__(self, fd: int, bundle_path: Optional[str]) -> None:
        self.fd = fd
        self.bundle = bundle_path
        self.boot_id = syscalls.boot_id()
        self._input = b""
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._waiting: Dict[int, Waiting] = {}
        """By the descriptor of the pipe on which the fork reports."""
        self._pid = os.getpid()
        self._namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if syscalls.LINUX else -1

    def serve(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if fd != self.fd:
                    self._hear(fd)
                elif not self._receive():
                    return

    def _receive(self) -> bool:
        data = os.read(self.fd, 1 << 16)
        if not data:
            return False
        self._input += data
        *lines, self._input = self._input.split(b"\n")
        for request in formats.parse_lines(lines):
            try:
                self._start(request)
            except OSError as exc:
                self._answer(
                    {
                        "id": request.get("id"),
                        "error": f"{errno.errorcode.get(exc.errno or 0, 'error')}: {exc.strerror}",
                    }
                )
        return True

    def _start(self, request: Dict[str, Any]) -> None:
        directly = bool(request.get("pid_namespace")) and not request.get("user_namespace")
        reader, writer = os.pipe()
        go_reader, go_writer = os.pipe() if directly else (-1, -1)
        try:
            pid = self._fork(directly)
        except OSError:
            for fd in (reader, go_writer):
                if fd >= 0:
                    os.close(fd)
            raise
        else:
            if pid == 0:
                start = child.StartRequest(request, writer, self.bundle, self.boot_id)
                if directly:
                    start.directly(go_reader)
                start.intermediate()
        finally:
            for fd in (writer, go_reader):
                if fd >= 0:
                    os.close(fd)
        self._waiting[reader] = Waiting(request, pid, go_writer if directly else None)
        self._poll.register(reader, select.POLLIN)

    def _fork(self, into_namespace: bool) -> int:
        """The namespace is made for the next child only; this process never leaves its own."""
        if not into_namespace:
            return os.fork()
        syscalls.unshare(syscalls.CLONE_NEWPID)
        try:
            pid = os.fork()
        finally:
            if os.getpid() == self._pid:
                self._back()
        return pid

    def _back(self) -> None:
        try:
            syscalls.setns(self._namespace, syscalls.CLONE_NEWPID)
        except OSError as exc:
            # Every further fork would fail: end, so that a new fork server is started.
            raise SystemExit(f"cannot return to the own PID namespace: {exc}") from exc

    def _hear(self, fd: int) -> None:
        waiting = self._waiting[fd]
        data = os.read(fd, 1 << 16)
        waiting.said += data
        if data and not waiting.said.endswith(b"\n"):
            return
        self._poll.unregister(fd)
        os.close(fd)
        del self._waiting[fd]
        answer = next(formats.parse_lines([waiting.said]), None)
        if answer is None:
            answer = {"error": "the process died before it was a launcher"}
        if waiting.go is not None:
            try:
                if not answer.get("error"):
                    answer = child.record(waiting.record, self.boot_id, waiting.pid, task=waiting.task)
                    os.write(waiting.go, b"g")
            except OSError as exc:
                answer = {"error": f"{errno.errorcode.get(exc.errno or 0, 'error')}: {exc}"}
            finally:
                os.close(waiting.go)
        self._answer({"id": waiting.id, **answer})

    def _answer(self, answer: Dict[str, Any]) -> None:
        whole = {
            "id": None,
            "pid": None,
            "start_time": None,
            "boot_id": self.boot_id,
            "error": None,
            "taken": False,
            **answer,
        }
        data = json.dumps(whole).encode() + b"\n"
        while data:
            data = data[os.write(self.fd, data) :]


def main(argv: List[str]) -> int:
    options = {argv[at]: argv[at + 1] for at in range(0, len(argv) - 1, 2)}
    if "--fd" not in options or set(options) - {"--fd", "--bundle"}:
        print("usage: python -m stoker.launcher.forkserver.server --fd N [--bundle PATH]", file=sys.stderr)
        return 64
    syscalls.libc()
    syscalls.set_name("stoker-forksrv")
    # Launchers whose intermediate has ended become ours, so that no dead one stays behind unreaped; and
    # intermediates are not waited for: the kernel takes both away. Each child restores the default.
    syscalls.subreaper()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = ForkServer(int(options["--fd"]), options.get("--bundle") or bundle.own())
    gc.collect()
    gc.freeze()
    try:
        server.serve()
    except (BrokenPipeError, ConnectionResetError):
        # The server went away while it was being answered, or before it had heard the answers.
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
