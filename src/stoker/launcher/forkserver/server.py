"""The fork server: starts a launcher in a millisecond, from an interpreter that has imported its code already.

    python -m stoker.launcher.forkserver.server --fd N [--bundle PATH]

Descriptor N is one end of a stream socket pair. Requests and answers are JSON lines:

    {"id": 1, "directory": "/abs", "pid_namespace": true, "user_namespace": false, "cover": {...},
     "record": "/abs/file", "task": {...}}
    {"id": 1, "pid": 4711, "start_time": 123, "boot_id": "...", "error": null, "taken": false}

How a child becomes a launcher is in `child`. Launchers outlive the fork server and the server.
`record` is the file in which the launcher is recorded, with `task` in it, outside its directory.
`cover` says what no task may see (`home_cover.cover`), where the launcher has a mount namespace of its own.
A launcher does nothing before it is recorded: if a step fails, nothing has been started.
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
from stoker.linux.process import boot_id
from stoker.task import formats


class PendingStart:
    """A child that has not reported yet."""

    def __init__(self, request: Dict[str, Any], pid: int, go: Optional[int]) -> None:
        self.id = request.get("id")
        self.record = str(request.get("record"))
        self.task = request.get("task")
        self.pid = pid
        self.go = go
        """The pipe on which the launcher waits for the go; None: the intermediate sends it."""
        self.received = b""


class ForkServer:
    """One thread, without children except intermediates; ends when its socket is closed."""

    def __init__(self, fd: int, bundle_path: Optional[str]) -> None:
        self.fd = fd
        self.bundle = bundle_path
        self.boot_id = boot_id()
        self._input = b""
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._pending: Dict[int, PendingStart] = {}
        """By the descriptor of the pipe on which the child reports."""
        self._pid = os.getpid()
        self._namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if syscalls.LINUX else -1

    def serve(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if fd != self.fd:
                    self._read_report(fd)
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
        self._pending[reader] = PendingStart(request, pid, go_writer if directly else None)
        self._poll.register(reader, select.POLLIN)

    def _fork(self, into_namespace: bool) -> int:
        """Fork. The new namespace is for the child only; this process stays in its own."""
        if not into_namespace:
            return os.fork()
        syscalls.unshare(syscalls.CLONE_NEWPID)
        try:
            pid = os.fork()
        finally:
            if os.getpid() == self._pid:
                self._leave_namespace()
        return pid

    def _leave_namespace(self) -> None:
        try:
            syscalls.setns(self._namespace, syscalls.CLONE_NEWPID)
        except OSError as exc:
            # Every further fork would fail: end, so that a new fork server is started.
            raise SystemExit(f"cannot return to the own PID namespace: {exc}") from exc

    def _read_report(self, fd: int) -> None:
        pending = self._pending[fd]
        data = os.read(fd, 1 << 16)
        pending.received += data
        if data and not pending.received.endswith(b"\n"):
            return
        self._poll.unregister(fd)
        os.close(fd)
        del self._pending[fd]
        answer = next(formats.parse_lines([pending.received]), None)
        if answer is None:
            answer = {"error": "the process died before it was a launcher"}
        if pending.go is not None:
            try:
                if not answer.get("error"):
                    answer = child.record(pending.record, self.boot_id, pending.pid, task=pending.task)
                    os.write(pending.go, b"g")
            except OSError as exc:
                answer = {"error": f"{errno.errorcode.get(exc.errno or 0, 'error')}: {exc}"}
            finally:
                os.close(pending.go)
        self._answer({"id": pending.id, **answer})

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
    # Launchers whose intermediate has ended become children of this process. With SIGCHLD ignored the kernel reaps these and
    # the intermediates. Each child restores the default.
    syscalls.subreaper()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = ForkServer(int(options["--fd"]), options.get("--bundle") or bundle.own())
    gc.collect()
    gc.freeze()
    try:
        server.serve()
    except (BrokenPipeError, ConnectionResetError):
        # The server has ended without reading all answers.
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
