"""Python in an image: locked wheels, and bytecode made by the image's own interpreter."""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from recipe import debian
from stoker.errors import ImageError
from stoker.images.build import cache_home
from stoker.images.layers import LayerTree

VERSION = "3.11"
"""The Python of the Debian suite in packages.toml."""
PACKAGES = f"usr/local/lib/python{VERSION}/dist-packages"
_ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
_LOADERS = {"amd64": "ld-linux-x86-64.so.2", "arm64": "ld-linux-aarch64.so.1"}
_BLANK_LINE = re.compile(r"\n(?=\S)")


def select(lock: str, names: set[str]) -> str:
    """The entries of a lock, with their hashes, for these packages."""
    chosen = {
        name: entry for entry in _BLANK_LINE.split(lock.strip()) for name in [_name(entry)] if name in names
    }
    if missing := names - set(chosen):
        raise ImageError(f"the lock has no {', '.join(sorted(missing))}", hint="Run `make lock`.")
    return "".join(f"{chosen[name]}\n" for name in sorted(chosen))


def closure(project: Path, lock: Path, architecture: str) -> set[str]:
    """The packages that the project needs at run time, without development tools: names in the lock."""
    mark = hashlib.sha256(f"{project.read_text()}\0{lock.read_text()}\0{architecture}".encode()).hexdigest()
    known = cache_home() / "closures" / mark
    if known.is_file():
        return set(known.read_text().split())
    said = _uv(
        "compile",
        *("--quiet", "--no-header", "--no-annotate", "--constraint", str(lock)),
        *_platform(architecture),
        str(project),
    )
    names = {_name(line) for line in said.splitlines() if "==" in line}
    known.parent.mkdir(parents=True, exist_ok=True)
    known.write_text("\n".join(sorted(names)))
    return names


def install(requirements: str, architecture: str) -> LayerTree:
    """Install wheels where Debian's Python finds them. All requirements must have versions and hashes."""
    with tempfile.TemporaryDirectory() as folder:
        listed, target = Path(folder) / "requirements.txt", Path(folder) / "target"
        listed.write_text(requirements)
        _uv(
            "install",
            *("--quiet", "--target", str(target), "--require-hashes", "--no-deps", "--only-binary", ":all:"),
            *("--link-mode", "copy", "--cache-dir", str(cache_home() / "uv"), "--no-config"),
            *("--requirements", str(listed)),
            *_platform(architecture),
        )
        _check_records(target)
        return _held(target)


def compiled(tree: LayerTree, lock: Path) -> LayerTree:
    """Bytecode of every module of a tree that compiles: with a read-only root, Python cannot write its own.

    Python uses the bytecode unchecked, because file times in an image mean nothing.
    """
    result = LayerTree()
    run = interpreter(lock)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        sources = LayerTree()
        for name, entry in tree:
            if name.endswith(".py") and entry.data is not None:
                sources.put(name, entry)
        sources.unpack(source)
        run("-c", _COMPILE, str(source))
        for path in sorted(source.rglob("*.pyc")):
            result.file(path.relative_to(source).as_posix(), path.read_bytes())
    return result


_COMPILE = """
import os, py_compile, sys
root = sys.argv[1]
os.chdir(root)
for folder, folders, files in os.walk("."):
    folders.sort()
    for name in sorted(files):
        path = os.path.join(folder, name)[2:]
        try:
            py_compile.compile(path, dfile="/" + path, doraise=True, quiet=2,
                               invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        except py_compile.PyCompileError:
            pass  # some packages have templates and tests in other syntaxes among their modules
"""


def interpreter(lock: Path) -> Run:
    """The image's Python on this machine, with its own libraries: no root, no container. Unpacked once."""
    machine = {name: debian_name for debian_name, name in _ARCHITECTURES.items()}.get(platform.machine())
    if machine is None:
        raise ImageError(
            f"cannot build on {platform.machine()}, only on {', '.join(_ARCHITECTURES.values())}"
        )
    sets = debian.read_lock(lock.with_name(f"packages.{machine}.lock"))
    packages = [*sets["base"], *sets["python"]]
    root = cache_home() / "interpreters" / debian.key_of(packages)[:16]
    if not root.is_dir():
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent) as folder:
            fresh = Path(folder) / "root"
            debian.unpack(packages, _needed).unpack(fresh)
            with contextlib.suppress(OSError):  # another process was first, with the same result
                fresh.rename(root)
    return Run(root, machine)


class Run:
    def __init__(self, root: Path, machine: str) -> None:
        self._home = root / "usr"
        libraries = f"{root}/usr/lib/{_ARCHITECTURES[machine]}-linux-gnu"
        program = root / f"usr/bin/python{VERSION}"
        self._argv = [
            f"{libraries}/{_LOADERS[machine]}",
            "--library-path",
            libraries,
            str(program),
            "-S",
            "-P",
        ]

    def __call__(self, *arguments: str) -> str:
        environment = {
            "PYTHONHOME": str(self._home),
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LC_ALL": "C.UTF-8",
        }
        done = subprocess.run(
            [*self._argv, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ImageError(f"the image's Python ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        return done.stdout


def _needed(name: str) -> bool:
    return name.startswith(("usr/lib", "usr/bin/python"))


def _check_records(target: Path) -> None:
    """Verify every file against its wheel's list. uv verifies wheels only when it downloads them. The files in its cache
    may have been changed in an environment that links to them."""
    for record in target.glob("*.dist-info/RECORD"):
        with open(record, newline="") as file:
            for name, mark, *_ in csv.reader(file):
                if mark.startswith("sha256=") and ".." not in Path(name).parts:
                    found = hashlib.sha256((target / name).read_bytes()).digest()
                    if base64.urlsafe_b64encode(found).decode().rstrip("=") != mark[7:]:
                        raise ImageError(
                            f"{name} of {record.parent.name} is not what its wheel says",
                            hint=f"Something changed it in the cache: delete {cache_home() / 'uv'}.",
                        )


def _held(target: Path) -> LayerTree:
    """The installed files as a tree. Scripts are left out: they refer to this machine's Python."""
    tree = LayerTree()
    for path in sorted(target.rglob("*")):
        name = path.relative_to(target).as_posix()
        if path.is_file() and not name.startswith("bin/") and not _LEFT_OUT.search(name):
            tree.file(
                f"{PACKAGES}/{name}", path.read_bytes(), 0o755 if path.stat().st_mode & 0o111 else 0o644
            )
    return tree


_LEFT_OUT = re.compile(
    r"(^|/)__pycache__/|\.dist-info/(RECORD|INSTALLER|REQUESTED|direct_url\.json|uv_cache\.json)$|^\.lock$"
)
"""Bytecode, and the installer's notes about this machine."""


def _platform(architecture: str) -> tuple[str, ...]:
    return (
        "--python-version",
        VERSION,
        "--python-platform",
        f"{_ARCHITECTURES[architecture]}-manylinux_2_36",
    )


def _uv(command: str, *arguments: str) -> str:
    program = Path(sys.executable).with_name("uv")
    argv = [str(program) if program.exists() else "uv", "pip", command, "--system-certs", *arguments]
    environment = {**os.environ, "UV_NO_PROGRESS": "1"}
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    except FileNotFoundError:
        raise ImageError("uv is not installed", hint="Run `make setup`, then use .venv/bin/python.") from None
    if done.returncode:
        raise ImageError(f"uv pip {command} failed: {done.stderr.strip()[-1000:]}")
    return done.stdout


def _name(entry: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>;\[ ]", entry, maxsplit=1)[0]).lower()
