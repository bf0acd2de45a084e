"""Real launchers on real directories, started in every way that the engine can start them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stoker.launcher.task_files import take_lock
from stoker.task import container_layout, formats, layout
from stoker.task.local_directory import LocalTaskDir
from support import container_box
from support.container_box import Pod, Shape
from support.waiting import wait

SOURCE = str(Path(__file__).parents[3] / "src")
PATH = "/usr/local/bin:/usr/bin:/bin"
PATIENCE = 30.0
ORDINARY = 54321
"""A user id that owns nothing."""


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    return wait(condition, what=what)


KNOWN: dict[str, Any] = {"run": "digits-7f3k", "attempt": 1, "task": "worker-0", "sample_every": 0.2}


class Task:
    """A prepared task directory, and the files its launcher writes."""

    def __init__(self, root: Path, **info: Any) -> None:
        self.root = root
        self.near = LocalTaskDir(str(root))
        self.seq = 0
        self.uid: int | None = None
        """The owner of the directory, if it is not this user."""
        if not root.exists():
            root.mkdir(parents=True)
            formats.write_json(str(root / layout.TASK), {**KNOWN, **info})

    def run(self, *argv: str, generation: int = 1, env: dict[str, str] | None = None, **more: Any) -> int:
        return self.order(
            "run", argv=list(argv), generation=generation, env={"PATH": PATH, **(env or {})}, **more
        )

    def sh(self, script: str, **more: Any) -> int:
        return self.run("/bin/sh", "-c", script, **more)

    def order(self, verb: str, *, generation: int = 1, seq: int | None = None, **more: Any) -> int:
        if seq is None:
            self.seq += 1
            seq = self.seq
        order = formats.Order(seq=seq, generation=generation, verb=verb, **more)
        if self.uid is None:
            self.near.write_order(order)
            return seq
        elsewhere = self.root.with_suffix(".order")
        formats.write_json(str(elsewhere), order.to_json(), mode=0o600)
        os.chown(elsewhere, self.uid, self.uid)
        elsewhere.rename(self.root / layout.ORDER)
        return seq

    def phase(self, *phases: str) -> formats.Status:
        def there() -> formats.Status | None:
            status = self.near.status()
            return status if status is not None and status.phase in phases else None

        try:
            return wait_for(there, f"phase {phases}")
        except AssertionError as exc:
            raise AssertionError(f"{exc}; {self.near.status()}; {self.journal()}; {self.errors()}") from None

    def ending(self, seq: int | None = None) -> formats.Ending:
        """The ending of the body of the newest order (or of `seq`), once it has ended."""

        def there() -> dict[str, Any] | None:
            wanted = self.seq if seq is None else seq
            found = [entry for entry in self.journal("ended") if entry["seq"] >= wanted]
            return found[-1] if found else None

        try:
            return formats.Ending.from_json(wait_for(there, "an ending"))
        except AssertionError as exc:
            raise AssertionError(f"{exc}; {self.near.status()}; {self.journal()}; {self.errors()}") from None

    def journal(self, kind: str | None = None) -> list[dict[str, Any]]:
        return [entry for entry in self.near.journal()[0] if kind is None or entry["k"] == kind]

    def log(self) -> list[formats.LogLine]:
        found: list[formats.LogLine] = []
        for path in sorted((self.root / layout.LOG).glob("*.log")):
            found.extend(formats.LogLine.decode(line) for line in path.read_bytes().split(b"\n")[:-1])
        return found

    def text(self, stream: str = "o") -> str:
        return "".join(
            line.text.decode() + ("" if line.partial else "\n")
            for line in self.log()
            if line.stream == stream
        )

    def said(self, words: str) -> None:
        """Wait until the body has printed this."""
        wait_for(lambda: words in self.text() + self.text("e"), f"{words!r} in the log")

    def errors(self) -> str:
        path = self.root / "launcher.err"
        return path.read_text() if path.exists() else ""

    def processes(self) -> list[int]:
        """The living processes of this task's bodies, found by the directory in their environment."""
        mark = f"STOKER_TASK_DIR={self.root}\0".encode()
        found = []
        for name in os.listdir("/proc"):
            try:
                if name.isdigit() and mark in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
            except OSError:
                continue
        return found

    def let_go(self) -> None:
        """Wait until the directory's lock is released."""

        def free() -> bool:
            fd = take_lock(str(self.root))
            if fd is not None:
                os.close(fd)
            return fd is not None

        wait_for(free, "the lock")

    def nothing_left(self) -> None:
        wait_for(lambda: not self.processes(), "the end of every process of the task")


class Launched:
    """A launcher that was started."""

    def __init__(self, pid: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.process = process

    def alive(self) -> bool:
        if self.process is not None:
            return self.process.poll() is None
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def gone(self) -> None:
        wait_for(lambda: not self.alive(), "the end of the launcher")


class ForkServer:
    """The real fork server, called directly."""

    def __init__(
        self, *, uid: int | None = None, python: str = sys.executable, options: Sequence[str] = ()
    ) -> None:
        ours, theirs = socket.socketpair()
        self.socket = ours
        self.process = subprocess.Popen(
            [python, "-m", "stoker.launcher.forkserver.server", "--fd", str(theirs.fileno()), *options],
            pass_fds=[theirs.fileno()],
            env={"PATH": PATH, "PYTHONPATH": SOURCE, "PYTHONDONTWRITEBYTECODE": "1", "OF_THE_SERVER": "yes"},
            cwd="/",
            **({} if uid is None else {"user": uid, "group": uid, "extra_groups": []}),
        )
        theirs.close()
        self.answers = ours.makefile("r")

    def ask(
        self,
        directory: str,
        *,
        pid_namespace: bool,
        user_namespace: bool = False,
        cover: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        request: dict[str, Any] = {
            "id": 7,
            "cover": cover,
            "directory": directory,
            "record": f"{directory}/{layout.ENGINE}",
        }
        request.update(pid_namespace=pid_namespace, user_namespace=user_namespace)
        self.socket.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(self.answers.readline())
        assert answer["id"] == 7
        return answer

    def close(self) -> int:
        self.answers.close()
        self.socket.close()
        return self.process.wait(30)


def python_for_all_users() -> str | None:
    """An interpreter that the ordinary user can run; the tests' own may be in a private home."""
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            done = subprocess.run(
                [python, "-c", "import sys; sys.exit(sys.version_info < (3, 9))"],
                user=ORDINARY,
                group=ORDINARY,
                extra_groups=[],
                cwd="/",
                capture_output=True,
            )
        except (OSError, PermissionError):
            continue
        if done.returncode == 0:
            return python
    return None


class Mode:
    """One way of starting a launcher."""

    wait_for = staticmethod(wait_for)

    def __init__(self, name: str) -> None:
        self.name = name
        self.user = name == "user-namespace"
        self.uid = ORDINARY if self.user and os.geteuid() == 0 else None
        self.options: Sequence[str] = ()
        """For the fork server."""
        self.cover: dict[str, Any] | None = None
        """The paths that the launcher has to hide."""
        self._server: ForkServer | None = None
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, task: Task) -> Launched:
        if self.uid is not None:
            task.uid = self.uid
            _give(task.root, self.uid)
        if self.name == "direct":
            process = subprocess.Popen(
                [sys.executable, "-m", "stoker.launcher", str(task.root)],
                env={"PATH": PATH, "PYTHONPATH": SOURCE},
                start_new_session=True,
            )
            self._processes.append(process)
            return Launched(process.pid, process)
        answer = self.ask(task)
        assert answer["error"] is None, answer
        return Launched(answer["pid"])

    def ask(self, task: Task) -> dict[str, Any]:
        """The fork server's answer to a request for a launcher."""
        return self.server.ask(
            str(task.root),
            pid_namespace=self.name != "guardian",
            user_namespace=self.user,
            cover=self.cover,
        )

    @property
    def server(self) -> ForkServer:
        if self._server is None:
            self._server = ForkServer(uid=self.uid, python=self.python, options=self.options)
        return self._server

    @property
    def python(self) -> str:
        if self.uid is None:
            return sys.executable
        return python_for_all_users() or pytest.skip("no interpreter that an ordinary user can run")

    def kill_server(self) -> None:
        self.server.process.kill()
        assert self.server.close() == -signal.SIGKILL
        self._server = None

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        if self._server is not None:
            assert self._server.close() == 0


def _give(root: Path, uid: int) -> None:
    for path in (root, *root.rglob("*")):
        os.chown(path, uid, uid, follow_symlinks=False)


def namespaces(user: bool) -> bool:
    flags = ["--user", "--map-current-user"] if user else []
    identity: dict[str, Any] = {}
    if user and os.geteuid() == 0:
        identity = {"user": ORDINARY, "group": ORDINARY, "extra_groups": []}
    command = ["unshare", *flags, "--pid", "--mount", "--fork", "true"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(command, capture_output=True, **identity).returncode == 0
    )


class InPod(Task):
    """A task directory in a pod, with its paths inside and outside the container."""

    def __init__(self, pod: Pod) -> None:
        super().__init__(pod.root)
        self.pod = pod
        self.uid = pod.shape.uid or None

    def run(self, *argv: str, **more: Any) -> int:
        return self.order("run", argv=list(argv), inherit=True, **more)


@pytest.fixture
def pod(place: Path) -> Iterator[Callable[..., InPod]]:
    """Makes one pod with an initialised directory; the test starts its main container."""
    if why := container_box.missing():
        pytest.skip(why)
    container_box.end_leftovers()
    made: list[Pod] = []

    def make(shape: Shape | None = None, **info: Any) -> InPod:
        known = {
            **KNOWN,
            "gpus": None,
            "workdir": ".",
            "home": container_layout.HOME,
            "setups": container_layout.SETUPS,
        }
        folder = place / f"pod-{len(made)}"
        folder.mkdir()
        made.append(Pod(folder, shape or Shape(), {**known, "secrets_dir": container_layout.SECRETS, **info}))
        made[-1].init()
        return InPod(made[-1])

    yield make
    for each in made:
        each.close()


MODES = ("namespace", "user-namespace", "guardian")


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> Iterator[Mode]:
    """Parametrized indirectly with `namespace` or `guardian`; the default is the best of this machine."""
    name = getattr(request, "param", None) or ("namespace" if namespaces(False) else "guardian")
    if name == "namespace" and not namespaces(False):
        pytest.skip("this user may not make PID namespaces")
    if name == "user-namespace" and not namespaces(True):
        pytest.skip("this machine does not let ordinary users make namespaces")
    made = Mode(name)
    yield made
    made.close()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user may pass through (pytest's own is closed to others)."""
    root = Path(tempfile.mkdtemp(prefix=f"{container_box.PLACE}{os.getpid()}-"))
    root.chmod(0o755)
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def task(place: Path) -> Iterator[Callable[..., Task]]:
    """Makes task directories; processes that still run in them are ended after the test."""
    made: list[Task] = []

    def make(name: str = "worker-0", **info: Any) -> Task:
        made.append(Task(place / name, **info))
        return made[-1]

    yield make
    for each in made:
        for pid in _launchers(each):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        each.nothing_left()


def _launchers(task: Task) -> list[int]:
    """Processes that have this task's lock open."""
    found = []
    lock = str(task.root / layout.LOCK)
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fds = os.listdir(f"/proc/{name}/fd")
                if any(os.readlink(f"/proc/{name}/fd/{fd}") == lock for fd in fds):
                    found.append(int(name))
            except OSError:
                continue
    return found
