"""The fork server: starts launchers in a millisecond, from an interpreter that has loaded them already.

    python -m stoker.launcher.forkserver --fd N [--bundle PATH]

Descriptor N is one end of a stream socket pair. Requests and answers are JSON lines:

    {"id": 1, "directory": "/abs", "pid_namespace": true, "user_namespace": false}
    {"id": 1, "pid": 4711, "start_time": 123, "boot_id": "...", "error": null}

Between the fork server and each launcher stands an intermediate process. With a PID namespace it makes the
namespace, forks the launcher as its init, records it in `engine.json`, lets it go and ends; without, it
stays as the launcher's guardian. Launchers outlive the fork server and the server.
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
import traceback
from typing import Any, Dict, List, NoReturn, Optional, Tuple

from stoker.launcher import bundle, files, guardian, linux
from stoker.launcher.launcher import launch
from stoker.task import formats, layout

ERROR_LOG = "launcher.err"
ERROR_LOG_LIMIT = 1 << 20


class ForkServer:
    """One thread, no children but intermediates; ends when its socket does."""

    def __init__(self, fd: int, bundle_path: Optional[str]) -> None:
        self.fd = fd
        self.bundle = bundle_path
        self.boot_id = linux.boot_id()
        self._input = b""
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._waiting: Dict[int, Tuple[Any, int, bytes]] = {}
        """Pipe of an intermediate -> request id, its pid, what it has said so far."""

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
                self._answer({"id": request.get("id"), "error": f"cannot fork: {exc.strerror}"})
        return True

    def _start(self, request: Dict[str, Any]) -> None:
        reader, writer = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(reader)
            os.close(writer)
            raise
        if pid == 0:
            Intermediate(request, writer, self.bundle, self.boot_id).run()
        os.close(writer)
        self._waiting[reader] = (request.get("id"), pid, b"")
        self._poll.register(reader, select.POLLIN)

    def _hear(self, fd: int) -> None:
        number, pid, said = self._waiting[fd]
        data = os.read(fd, 1 << 16)
        said += data
        if data and not said.endswith(b"\n"):
            self._waiting[fd] = (number, pid, said)
            return
        self._poll.unregister(fd)
        os.close(fd)
        del self._waiting[fd]
        answer = next(formats.parse_lines([said]), None) or {"error": "the intermediate process died"}
        self._answer({"id": number, **answer})

    def _answer(self, answer: Dict[str, Any]) -> None:
        whole = {
            "id": None,
            "pid": None,
            "start_time": None,
            "boot_id": self.boot_id,
            "error": None,
            **answer,
        }
        data = json.dumps(whole).encode() + b"\n"
        while data:
            data = data[os.write(self.fd, data) :]


class Intermediate:
    """The process between: runs in a fork of the fork server and never returns into it."""

    def __init__(
        self, request: Dict[str, Any], report: int, bundle_path: Optional[str], boot_id: str
    ) -> None:
        self.directory = str(request.get("directory"))
        self.namespace = bool(request.get("pid_namespace"))
        self.user_namespace = bool(request.get("user_namespace"))
        self.report = report
        self.bundle = bundle_path
        self.boot_id = boot_id

    def run(self) -> NoReturn:
        code = 1
        try:
            self._prepare()
            code = self._start()
        except OSError as exc:
            name = errno.errorcode.get(exc.errno or 0, "error")
            self._say({"error": f"{name}: {exc.strerror or exc}"})
        except BaseException as exc:  # noqa: BLE001 - a fork must never run on in the fork server's code
            self._say({"error": f"{type(exc).__name__}: {exc}"})
        finally:
            os._exit(code)

    def _prepare(self) -> None:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        linux.close_fds([self.report])
        os.environ.clear()
        os.chdir("/")
        if not os.path.isabs(self.directory) or not os.path.isfile(os.path.join(self.directory, layout.TASK)):
            raise FileNotFoundError(
                errno.ENOENT, f"no {layout.TASK} in {self.directory!r} (an absolute path)"
            )
        null = os.open(os.devnull, os.O_RDWR)
        errors = _error_log(self.directory)
        for source, target in ((null, 0), (null, 1), (errors, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(errors)

    def _start(self) -> int:
        if self.namespace:
            _enter_namespaces(self.user_namespace)
        else:
            linux.subreaper()
        go_reader, go_writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(go_writer)
            self._become_launcher(go_reader)
        os.close(go_reader)
        started = linux.start_time(pid)
        record: Dict[str, Any] = {"boot_id": self.boot_id, "pid": pid, "start_time": started}
        if not self.namespace:
            record["guardian"] = {"pid": os.getpid(), "start_time": linux.start_time(os.getpid())}
        formats.write_json(os.path.join(self.directory, layout.ENGINE), record)
        os.write(go_writer, b"g")
        os.close(go_writer)
        self._say({"pid": pid, "start_time": started})
        if not self.namespace:
            os.close(self.report)
            known = files.read_json(os.path.join(self.directory, layout.TASK)) or {}
            guardian.guard(pid, known.get("cgroup"))
        return 0

    def _become_launcher(self, go: int) -> NoReturn:
        code = 70
        try:
            os.close(self.report)
            if os.read(go, 1) != b"g":
                os._exit(0)
            os.close(go)
            if self.namespace:
                # Not before: the intermediate shares these mounts and reads our start time from the outer /proc.
                _own_proc()
            linux.set_name("stoker-launcher")
            code = launch(self.directory, self.bundle)
        except BaseException:  # noqa: BLE001 - as above; what it was goes to launcher.err
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _say(self, answer: Dict[str, Any]) -> None:
        os.write(self.report, json.dumps(answer).encode() + b"\n")


def _enter_namespaces(user: bool) -> None:
    uid, gid = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWPID | linux.CLONE_NEWNS | (linux.CLONE_NEWUSER if user else 0))
    if user:
        for name, value in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(value)
    # What is mounted on the machine later is seen here too, and nothing mounted here is seen outside.
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_SLAVE)


def _own_proc() -> None:
    try:
        linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    except OSError:
        # Some containers forbid it. The launcher copes: it then counts by the outer numbers.
        pass


def _error_log(directory: str) -> int:
    path = os.path.join(directory, ERROR_LOG)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if os.fstat(fd).st_size > ERROR_LOG_LIMIT:
        os.ftruncate(fd, 0)
    return fd


def main(argv: List[str]) -> int:
    options = {argv[at]: argv[at + 1] for at in range(0, len(argv) - 1, 2)}
    if "--fd" not in options or set(options) - {"--fd", "--bundle"}:
        print("usage: python -m stoker.launcher.forkserver --fd N [--bundle PATH]", file=sys.stderr)
        return 64
    linux.libc()
    linux.set_name("stoker-forksrv")
    # Launchers whose intermediate has ended become ours, so that no dead one stays behind unreaped; and
    # intermediates are not waited for: the kernel takes both away. Each child restores the default.
    linux.subreaper()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = ForkServer(int(options["--fd"]), options.get("--bundle") or bundle.own())
    gc.collect()
    gc.freeze()
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
