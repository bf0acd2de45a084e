"""podman and docker with their own storage and images, made here from busybox and this machine's Python.

Everything is below one directory and is removed with it. Features that this kernel or container does not
allow are turned off in the runtimes' configuration, as an administrator would do.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

from support.busybox import APPLETS

IMAGE = "localhost/stoker-test:1"
BARE = "localhost/stoker-bare:1"
"""The same without Python."""
PYTHON = "/usr/bin/python3"
GROUPS = Path("/sys/fs/cgroup")
_LEFT_OUT = (
    "test",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "tkinter",
    "turtledemo",
    "__pycache__",
)


class Runtime:
    """A storage. `close` removes it."""

    program = ""

    def __init__(self, root: Path) -> None:
        self.root = root
        # All processes share the groups' parent directory; only the last to close removes what is left in it.
        self._groups = os.open(GROUPS, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._groups, fcntl.LOCK_SH)
        self.env: dict[str, str] = {}
        """The environment that makes the engine use this runtime only."""
        (root / "bin").mkdir()
        (root / "bin" / self.program).symlink_to(shutil.which(self.program) or "")
        self.env["PATH"] = str(root / "bin")

    def make_images(self) -> None:
        for name, python in ((IMAGE, True), (BARE, False)):
            tar = self.root / "image.tar"
            _write_image(tar, python)
            changes = [
                *("ENV PATH=/usr/local/bin:/usr/bin:/bin", "ENV OF_THE_IMAGE=yes"),
                *("ENV NVIDIA_VISIBLE_DEVICES=all", "WORKDIR /workdir", 'ENTRYPOINT ["cat"]', 'CMD ["mark"]'),
            ]
            flags = [word for change in changes for word in ("--change", change)]
            self("import", *flags, str(tar), name)
            tar.unlink()

    def __call__(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            [str(self.root / "bin" / self.program), *words],
            env={**os.environ, **self.env, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout if done.returncode == 0 else done.stderr

    def remove_all(self) -> None:
        if names := self("ps", "--all", "--quiet").split():
            self("rm", "--force", *names, check=False)

    def last_words(self) -> str:
        """The end of the runtime's log."""
        return ""

    def close(self) -> None:
        self.remove_all()
        self.end()
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for path in sorted((path for path in mounts if path.startswith(f"{self.root}/")), reverse=True):
            subprocess.run(["umount", path], capture_output=True)
        try:
            fcntl.flock(self._groups, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for parent in ("libpod_parent", "docker"):
                for top in GROUPS.glob(f"*/{parent}"):
                    _remove_groups(top)
        except BlockingIOError:
            pass  # containers of another test process are in it
        finally:
            os.close(self._groups)

    def end(self) -> None:
        """End the runtime's own processes."""


class Docker(Runtime):
    """A daemon of its own, on its own socket."""

    program = "docker"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        host = f"unix://{root}/docker.sock"
        self.env["DOCKER_HOST"] = host
        words = ["--host", host, "--data-root", f"{root}/data", "--exec-root", f"{root}/exec"]
        words += ["--pidfile", f"{root}/pid", "--storage-driver", "vfs", "--bridge", "none"]
        words += ["--iptables=false", "--ip6tables=false", "--exec-opt", "native.cgroupdriver=cgroupfs"]
        with (root / "dockerd.log").open("wb") as log:
            self._daemon = subprocess.Popen(
                ["dockerd", *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 120
        while "Server" not in self("version", check=False):
            if time.monotonic() > deadline or self._daemon.poll() is not None:
                self.end()
                raise AssertionError(f"docker does not start: {self.last_words()}")
            time.sleep(0.1)

    def last_words(self) -> str:
        return (self.root / "dockerd.log").read_text()[-4000:]

    def end(self) -> None:
        self._daemon.terminate()
        self._daemon.wait(60)


class Podman(Runtime):
    program = "podman"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        storage, config = root / "storage.conf", root / "containers.conf"
        storage.write_text(
            f'[storage]\ndriver = "vfs"\nrunroot = "{root}/run"\ngraphroot = "{root}/graph"\n',
            encoding="utf-8",
        )
        lines = ["[engine]", 'cgroup_manager = "cgroupfs"', 'events_logger = "none"']
        # The default is in /run, where it would remain.
        lines += [f'tmp_dir = "{root}/tmp"']
        # crun refuses machines with both versions of control groups.
        lines += ['runtime = "runc"'] if shutil.which("runc") else []
        config.write_text("\n".join(lines) + "\n")
        self.env |= {"CONTAINERS_STORAGE_CONF": str(storage), "CONTAINERS_CONF": str(config)}

    def end(self) -> None:
        self("rmi", "--all", "--force", check=False)
        if shutil.which("runc"):
            _forget_killed(self.root)


def _forget_killed(root: Path) -> None:
    """podman forgets a container whose conmon was killed, but leaves runc's state of it."""
    said = subprocess.run(["runc", "list", "--format", "json"], check=True, capture_output=True, text=True)
    for known in json.loads(said.stdout) or ():
        if known["bundle"].startswith(f"{root}/"):
            subprocess.run(["runc", "delete", "--force", known["id"]], check=True, capture_output=True)


RUNTIMES = {"podman": Podman, "docker": Docker}


def missing(runtime: str) -> str:
    """Why tests cannot use this runtime; empty: they can."""
    if os.geteuid() != 0:
        return f"{runtime} is tested as root here"
    packages = {"podman": {"podman": "podman"}, "docker": {"docker": "docker.io", "dockerd": "docker.io"}}
    for program, package in {**packages[runtime], "busybox": "busybox-static"}.items():
        if shutil.which(program) is None:
            return f"{program} is not installed (package {package})"
    if not Path(PYTHON).exists():
        return f"{PYTHON} is not there to make an image of"
    return ""


def _remove_groups(top: Path) -> None:
    for group in [*sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True), top]:
        try:
            group.rmdir()
        except OSError:
            pass  # containers of another test process are in it


def _write_image(path: Path, python: bool) -> None:
    with tarfile.open(path, "w") as tar:
        _directory(tar, "tmp", 0o1777)
        _file(tar, "workdir/mark", b"of the image\n")
        _file(tar, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n")
        _directory(tar, "root", 0o700)
        tar.add(shutil.which("busybox") or "", "bin/busybox")
        for applet in APPLETS:
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
        if python:
            _add_python(tar)


def _add_python(tar: tarfile.TarFile) -> None:
    ask = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    stdlib = Path(
        subprocess.run([PYTHON, "-I", "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    )
    real = os.path.realpath(PYTHON)
    tar.add(real, "usr/local/bin/python3")
    modules = [
        path for path in sorted(stdlib.rglob("*")) if not set(path.relative_to(stdlib).parts) & set(_LEFT_OUT)
    ]
    for path in modules:
        if path.is_file():
            tar.add(os.path.realpath(path), f"usr/local/lib/{stdlib.name}/{path.relative_to(stdlib)}")
    needed = {real, *(str(path) for path in modules if path.suffix == ".so")}
    for library in sorted(set(_libraries(needed))):
        tar.add(os.path.realpath(library), library.lstrip("/"))


def _libraries(programs: set[str]) -> Iterator[str]:
    said = subprocess.run(["ldd", *sorted(programs)], capture_output=True, text=True).stdout
    for line in said.splitlines():
        found = [word for word in line.split() if word.startswith("/") and not word.endswith(":")]
        yield from (word for word in found if ".so" in word and word not in programs)


def _directory(tar: tarfile.TarFile, name: str, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    tar.addfile(entry)


def _file(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))
