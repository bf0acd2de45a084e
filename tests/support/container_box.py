"""Real containers without an engine: runc with a root file system of busybox and this machine's Python.

The pod is imitated as far as the launcher can see it: volumes for the task directory and for the bundle, an
init container, a main container that is started again when it fails (`Pod.main` may be called again).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from stoker.launcher import bundle
from stoker.task import container_layout
from support.busybox import APPLETS

MEMORY = Path("/sys/fs/cgroup/memory")
NAME = "stoker-test-"
PLACE = "stoker-launcher-"
"""Prefix of the names of containers and directories; the pid of the test process follows."""


def missing() -> str:
    """Why there are no containers here; empty: there are."""
    if os.geteuid() != 0:
        return "runc needs root here"
    for program, package in (("runc", "runc"), ("busybox", "busybox-static")):
        if shutil.which(program) is None:
            return f"{program} is not installed (package {package})"
    return ""


@cache
def end_leftovers() -> None:
    """Remove containers of killed tests, once per process. They outlive a test that times out."""
    said = subprocess.run(["runc", "list", "--format", "json"], check=True, capture_output=True, text=True)
    for known in json.loads(said.stdout) or ():
        if _is_left(known["id"], NAME):
            subprocess.run(["runc", "delete", "--force", known["id"]], capture_output=True)
    for place in Path(tempfile.gettempdir()).glob(f"{PLACE}*"):
        if _is_left(place.name, PLACE):
            shutil.rmtree(place, ignore_errors=True)
    _remove_group()


def _is_left(name: str, prefix: str) -> bool:
    tester = name.removeprefix(prefix).partition("-")[0]
    return name.startswith(prefix) and tester.isdecimal() and not Path(f"/proc/{tester}").exists()


def _remove_group() -> None:
    for group in Path("/sys/fs/cgroup").glob("*/stoker-tests"):
        try:
            group.rmdir()
        except OSError:
            pass  # other tests have containers in it


@dataclass
class Shape:
    """One kind of image, and how it is run."""

    uid: int = 0
    read_only: bool = False
    python: str | None = "/usr/local"
    """Prefix of its Python; None: it has none."""
    shell: bool = True
    env: dict[str, str] = field(default_factory=dict)
    memory: int | None = None
    own_processes: bool = True
    """A PID namespace of its own; False: as with shareProcessNamespace, the launcher is not init."""

    def environment(self) -> list[str]:
        path = "/usr/local/bin:/usr/bin:/bin"
        if self.python and self.python != "/usr/local":
            path = f"{self.python}/bin:{path}"
        return [f"{key}={value}" for key, value in {"PATH": path, "HOME": "/", **self.env}.items()]


class Pod:
    """Volumes that outlive the containers beside them. `close` ends and removes everything."""

    def __init__(self, place: Path, shape: Shape, task: dict[str, Any]) -> None:
        self.shape = shape
        self.place = place
        self.root = place / "task"
        for name in ("task", "bin", "home", "setup", "tmp"):
            (place / name).mkdir()
            (place / name).chmod(0o777)  # like an emptyDir: owned by root, writable by all
        for name in ("init", "secrets", "images"):
            (place / name).mkdir()
        (place / "init" / "task.json").write_text(json.dumps(task))
        bundle.write_zip(str(place / "init" / "bundle.zip"))
        self.rootfs = _rootfs(place / "rootfs", shape)
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def init(self) -> None:
        argv = container_layout.command(
            "/stoker/init/bundle.zip",
            "init",
            "/stoker/init/task.json",
            container_layout.TASK,
            container_layout.BIN,
        )
        done = self.start("init", argv)
        assert done.wait(60) == 0, self.said("init")

    def main(self, argv: list[str] | None = None) -> subprocess.Popen[bytes]:
        """Start the launcher, or `argv` instead."""
        return self.start(
            "main",
            argv or container_layout.command(container_layout.CURRENT, "launch", container_layout.TASK),
        )

    def start(self, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
        ident = f"{NAME}{os.getpid()}-{uuid.uuid4().hex[:12]}"
        folder = self.place / "images" / ident
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self._config(name, argv, ident)))
        with (self.place / f"{name}.out").open("ab") as out:
            process = subprocess.Popen(
                ["runc", "run", "--bundle", str(folder), ident],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        self._running.append((ident, process))
        return process

    def said(self, name: str = "main") -> str:
        return (self.place / f"{name}.out").read_text()

    @property
    def ident(self) -> str:
        """The id of the newest container."""
        return self._running[-1][0]

    def exec(self, *argv: str) -> subprocess.CompletedProcess[str]:
        command = ["runc", "exec", self.ident, *argv]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal the container's first process, as the kubelet does."""
        subprocess.run(["runc", "kill", self.ident, str(int(number))], check=True, capture_output=True)

    def pids(self) -> list[int]:
        done = subprocess.run(["runc", "ps", "-f", "json", self.ident], capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else []

    def close(self) -> None:
        for ident, process in self._running:
            subprocess.run(["runc", "delete", "--force", ident], capture_output=True)
            process.wait(30)
        _remove_group()

    def _config(self, name: str, argv: list[str], ident: str) -> dict[str, Any]:
        shape = self.shape
        namespaces = [{"type": kind} for kind in ("mount", "ipc", "uts")]
        if shape.own_processes:
            namespaces.append({"type": "pid"})
        resources: dict[str, Any] = {"devices": [{"allow": False, "access": "rwm"}]}
        if shape.memory is not None and name == "main":
            resources["memory"] = {"limit": shape.memory, "swap": shape.memory}
        return {
            "ociVersion": "1.0.2",
            "process": {
                "args": argv,
                "env": shape.environment(),
                "cwd": "/workdir",
                "user": {"uid": shape.uid, "gid": shape.uid},
                "noNewPrivileges": True,
            },
            "root": {"path": str(self.rootfs), "readonly": shape.read_only},
            "mounts": [*_SYSTEM, *self._binds(name)],
            "linux": {
                "namespaces": namespaces,
                "resources": resources,
                "cgroupsPath": f"/stoker-tests/{ident}",
            },
        }

    def _binds(self, name: str) -> list[dict[str, Any]]:
        found = [
            _bind(place, place, "ro") for place in ("/lib", "/lib64", "/usr/lib") if os.path.isdir(place)
        ]
        if self.shape.python is not None:
            program, library = _python()
            found.append(_bind(program, f"{self.shape.python}/bin/python3", "ro"))
            found.append(_bind(library, f"{self.shape.python}/lib/{Path(library).name}", "ro"))
        found += [_bind(str(self.place / part), f"/stoker/{part}") for part in ("task", "home", "setup")]
        found.append(_bind(str(self.place / "bin"), "/stoker/bin", "rw" if name == "init" else "ro"))
        found.append(_bind(str(self.place / "tmp"), "/tmp"))
        if name == "init":
            found.append(_bind(str(self.place / "init"), "/stoker/init", "ro"))
        else:
            found.append(_bind(str(self.place / "secrets"), "/stoker/secrets", "ro"))
        return found


@cache
def _python() -> tuple[str, str]:
    """The program and library of a relocatable Python; a system Python needs no library of its own."""
    ask = "import os, sys, sysconfig; print(os.path.realpath(sys.executable)); print(sysconfig.get_path('stdlib'))"
    for python in filter(os.path.exists, ("/usr/bin/python3", sys.executable)):
        done = subprocess.run([python, "-I", "-c", ask], capture_output=True, text=True)
        if done.returncode == 0:
            program, library = done.stdout.split()
            return program, library
    raise AssertionError("no Python answers")


_SYSTEM: list[dict[str, Any]] = [
    {"destination": "/proc", "type": "proc", "source": "proc"},
    {
        "destination": "/dev",
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", "mode=755", "size=64k"],
    },
    {
        "destination": "/sys",
        "type": "sysfs",
        "source": "sysfs",
        "options": ["nosuid", "noexec", "nodev", "ro"],
    },
    {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"]},
]


def _bind(source: str, target: str, mode: str = "rw") -> dict[str, Any]:
    return {"destination": target, "type": "bind", "source": source, "options": ["rbind", mode]}


def _rootfs(root: Path, shape: Shape) -> Path:
    for name in ("bin", "dev", "proc", "sys", "tmp", "workdir", "etc"):
        (root / name).mkdir(parents=True)
    if shape.shell:
        shutil.copy(shutil.which("busybox") or "", root / "bin" / "busybox")
        for applet in APPLETS:
            (root / "bin" / applet).symlink_to("busybox")
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "workdir" / "mark").write_text("of the image\n")
    return root
