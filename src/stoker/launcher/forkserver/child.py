"""The child of the fork server that becomes a launcher. No function here returns into the fork server's code.

Directly: the fork server has made the PID namespace and the child is its init. It reports that it is prepared, and waits for
the go. Through an intermediate process, where a process cannot leave a namespace again (user namespaces) or a guardian has
to stay: the intermediate forks the launcher, records it and sends the go.

Both ways take the directory's lock first. When a server dies during a start, and the next one asks for the same launcher, only
one launcher is recorded, and only that one works.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
import traceback
from typing import Any, Callable, Dict, NoReturn, Optional

from stoker.launcher import task_files
from stoker.launcher.forkserver import guardian, home_cover
from stoker.launcher.launcher import launch
from stoker.linux import syscalls
from stoker.task import formats, layout

ERROR_LOG = "launcher.err"
ERROR_LOG_LIMIT = 1 << 20


def record(path: str, boot_id: str, pid: int, **more: Any) -> Dict[str, Any]:
    """Write the engine's record of the launcher, by which it can be found. The launcher must not act before that. `path` is
    outside the task directory, because user code can change that directory."""
    known = {"boot_id": boot_id, "pid": pid, "start_time": syscalls.start_time(pid), **more}
    formats.write_json(path, known, mode=0o600)
    return {"pid": pid, "start_time": known["start_time"]}


class DirectoryInUse(Exception):
    """Another launcher has the directory's lock."""


class StartRequest:
    """One request, in a process of its own. `report`: the descriptor for the result, one JSON line."""

    def __init__(self, request: Dict[str, Any], report: int, bundle: Optional[str], boot_id: str) -> None:
        self.directory = str(request.get("directory"))
        self.namespace = bool(request.get("pid_namespace"))
        self.user_namespace = bool(request.get("user_namespace"))
        self.record = str(request.get("record"))
        self.task = request.get("task")
        self.report = report
        self.bundle = bundle
        self.boot_id = boot_id
        self.cover: Optional[Dict[str, Any]] = request.get("cover")
        self.lock: Optional[int] = None

    def directly(self, go: int) -> NoReturn:
        """Become the launcher, as init of the namespace that this process was forked into."""

        def work() -> int:
            self._prepare(go)
            self._take_lock()
            syscalls.unshare(syscalls.CLONE_NEWNS)
            _make_mounts_private()
            self._report({})
            return self._become_launcher(go)

        self._run(work)

    def intermediate(self) -> NoReturn:
        def work() -> int:
            self._prepare()
            self._take_lock()
            return self._fork_launcher()

        self._run(work)

    def _run(self, work: Callable[[], int]) -> NoReturn:
        code = 70
        try:
            code = work()
        except DirectoryInUse:
            self._report({"error": "another launcher works on it", "taken": True})
        except OSError as exc:
            name = errno.errorcode.get(exc.errno or 0, "error")
            self._report({"error": f"{name}: {exc.strerror or exc}"})
        except BaseException as exc:  # noqa: BLE001 - the child must never continue in the fork server's code
            traceback.print_exc()
            self._report({"error": f"{type(exc).__name__}: {exc}"})
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _prepare(self, *keep: int) -> None:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        syscalls.close_fds([self.report, *keep])
        os.environ.clear()
        os.chdir("/")
        if not os.path.isabs(self.directory) or not os.path.isfile(os.path.join(self.directory, layout.TASK)):
            raise FileNotFoundError(
                errno.ENOENT, f"no {layout.TASK} in {self.directory!r} (an absolute path)"
            )
        null = os.open(os.devnull, os.O_RDWR)
        for target in (0, 1, 2):
            os.dup2(null, target)
        os.close(null)
        sys.stderr = _ErrorLog(os.path.join(self.directory, ERROR_LOG))

    def _take_lock(self) -> None:
        """The guardian holds the lock too: while it is held, processes of the task may be alive."""
        self.lock = task_files.take_lock(self.directory)
        if self.lock is None:
            raise DirectoryInUse

    def _fork_launcher(self) -> int:
        if self.namespace:
            _enter_namespaces(self.user_namespace)
        else:
            syscalls.subreaper()
        go_reader, go_writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(go_writer)
            self._run(lambda: self._become_launcher(go_reader))
        os.close(go_reader)
        more: Dict[str, Any] = {"task": self.task}
        if not self.namespace:
            more["guardian"] = {"pid": os.getpid(), "start_time": syscalls.start_time(os.getpid())}
        answer = record(self.record, self.boot_id, pid, **more)
        os.write(go_writer, b"g")
        os.close(go_writer)
        self._report(answer)
        if not self.namespace:
            guardian.guard(pid, (self.task or {}).get("cgroup"))
        return 0

    def _become_launcher(self, go: int) -> int:
        self._close_report()
        if os.read(go, 1) != b"g":
            return 0
        os.close(go)
        if self.namespace:
            # Only after the go: the intermediate may share these mounts, and needs the outer /proc to record this process.
            _mount_proc()
            if self.cover is not None:
                home_cover.cover(self.cover, self.directory)
        syscalls.set_name("stoker-launcher")
        return launch(self.directory, self.bundle, self.lock)

    def _report(self, answer: Dict[str, Any]) -> None:
        """Report once. Later errors go to launcher.err."""
        if self.report >= 0:
            try:
                os.write(self.report, json.dumps(answer).encode() + b"\n")
            except BrokenPipeError:
                # The fork server has ended with its server. The launcher is recorded, so the next server finds it.
                pass
            self._close_report()

    def _close_report(self) -> None:
        if self.report >= 0:
            os.close(self.report)
            self.report = -1


def _enter_namespaces(user: bool) -> None:
    uid, gid = os.geteuid(), os.getegid()
    syscalls.unshare(syscalls.CLONE_NEWPID | syscalls.CLONE_NEWNS | (syscalls.CLONE_NEWUSER if user else 0))
    if user:
        maps = (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"))
        for name, value in maps:
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(value)
    _make_mounts_private()


def _make_mounts_private() -> None:
    """Later mounts of the machine are visible here, but mounts made here are not visible outside."""
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)


def _mount_proc() -> None:
    try:
        syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
    except OSError:
        # Some containers forbid it. The launcher then works with the pids of the outer namespace.
        pass


class _ErrorLog(io.TextIOBase):
    """launcher.err, made only when there is an error: nearly every task does without the file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def write(self, text: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(self.path, flags, 0o600)
        except OSError:
            return len(text)
        try:
            if os.fstat(fd).st_size < ERROR_LOG_LIMIT:
                os.write(fd, text.encode("utf-8", "replace"))
        except OSError:
            # The disk is full, and there is no other place for the error.
            pass
        finally:
            os.close(fd)
        return len(text)
