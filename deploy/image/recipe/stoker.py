"""Stoker's image: Debian's Python, the locked dependencies, Stoker, and the bundle for its pods.

Runs under a user id, not as root, with a read-only root file system: all it writes is beneath STOKER_HOME.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from recipe import debian, python
from stoker.errors import ImageError
from stoker.images import layers
from stoker.images.build import Cache, Image, Settings, assemble
from stoker.images.layers import Layer, LayerTree

ROOT = Path(__file__).parents[3]
LOCKS = Path(__file__).parents[1]
UID = 65532
HOME = "/var/lib/stoker"
BUNDLE = "opt/stoker/bundle.zip"


def image(cache: Cache, architecture: str = "amd64") -> Image:
    made = [base(cache, architecture), runtime(cache, architecture)]
    made += [dependencies(cache, architecture), program(cache)]
    return assemble(made, settings(architecture))


def settings(architecture: str) -> Settings:
    return Settings(
        entrypoint=("stoker",),
        workdir=HOME,
        user=f"{UID}:{UID}",
        env={
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": HOME,
            "STOKER_HOME": HOME,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
        },
        labels={
            "org.opencontainers.image.title": "stoker",
            "org.opencontainers.image.licenses": "Apache-2.0",
        },
        architecture=architecture,
    )


def base(cache: Cache, architecture: str = "amd64") -> Layer:
    """A small Debian: libc, a shell, coreutils, certificates, time zones."""
    packages = debian.read_lock(lock(architecture))["base"]

    def make() -> LayerTree:
        tree = debian.unpack(packages)
        debian.finish(tree)
        return tree

    return cache.layer(key("base", debian.key_of(packages)), make, "debian: base")


def runtime(cache: Cache, architecture: str = "amd64") -> Layer:
    """Python and the libraries it needs."""
    packages = debian.read_lock(lock(architecture))["python"]

    def make() -> LayerTree:
        tree = debian.unpack(packages)
        tree.add(python.compiled(tree, lock(architecture)))
        return tree

    return cache.layer(key("python", debian.key_of(packages)), make, "debian: python3")


def dependencies(cache: Cache, architecture: str = "amd64") -> Layer:
    requirements = ROOT / "requirements/lock.txt"
    names = python.closure(ROOT / "pyproject.toml", requirements, architecture)
    return wheels(cache, names, architecture, "stoker: dependencies")


def wheels(cache: Cache, names: set[str], architecture: str, made_by: str) -> Layer:
    """Packages of the project's lock."""
    chosen = python.select((ROOT / "requirements/lock.txt").read_text(), names)

    def make() -> LayerTree:
        tree = python.install(chosen, architecture)
        tree.add(python.compiled(tree, lock(architecture)))
        return tree

    return cache.layer(key("wheels", architecture, chosen), make, made_by)


def program(cache: Cache, root: Path = ROOT) -> Layer:
    """The files of Stoker's wheel, and the bundle. The same for every architecture."""
    sources = sorted(path for path in (root / "src").rglob("*") if path.is_file() and _is_source(path))
    files = [*sources, root / "pyproject.toml", root / "README.md"]
    mark = hashlib.sha256()
    for path in files:
        data = path.read_bytes()
        mark.update(f"{path.relative_to(root)}\0{len(data)}\0".encode() + data)
    return cache.layer(key("stoker", mark.hexdigest()), lambda: _program(files, root), "stoker")


def lock(architecture: str) -> Path:
    return LOCKS / f"packages.{architecture}.lock"


def key(*parts: str) -> str:
    """The cache key of a layer: its inputs, and the code that makes it."""
    return "\0".join((*parts, _CODE))


def _hash_of_code() -> str:
    found = hashlib.sha256()
    for path in (*sorted(Path(__file__).parent.glob("*.py")), Path(layers.__file__)):
        found.update(path.read_bytes())
    return found.hexdigest()


_CODE = _hash_of_code()
"""Computed at import: a process that still runs old code must not store its layers under the new code's key."""


def _program(files: list[Path], root: Path) -> LayerTree:
    tree = LayerTree()
    with tempfile.TemporaryDirectory() as folder:
        for name, data in _wheel(files, root, Path(folder)).items():
            if not name.endswith(".dist-info/RECORD"):
                tree.file(f"{python.PACKAGES}/{name}", data)
    tree.add(python.compiled(tree, lock("amd64")))
    tree.file("usr/local/bin/stoker", _SCRIPT, 0o755)
    tree.file(BUNDLE, _bundle(root))
    tree.file("etc/passwd", _PASSWD + f"stoker:x:{UID}:{UID}:stoker:{HOME}:/bin/sh\n")
    tree.file("etc/group", f"root:x:0:\nnogroup:x:65534:\nstoker:x:{UID}:\n")
    tree.directory(HOME, 0o700, owner=UID)
    return tree


_SCRIPT = """\
#!/usr/bin/python3
import sys

from stoker.cli.main import main

sys.exit(main())
"""
_PASSWD = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"


def _wheel(files: list[Path], root: Path, folder: Path) -> dict[str, bytes]:
    """The files of the wheel, built from a copy: the checkout is not changed."""
    for path in files:
        copy = folder / "source" / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    _run("-c", _BUILD, str(folder / "wheel"), cwd=folder / "source")
    (built,) = (folder / "wheel").glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


_BUILD = """
import os, sys
from setuptools import build_meta
os.makedirs(sys.argv[1])
build_meta.build_wheel(sys.argv[1])
"""


def _bundle(root: Path) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bundle.zip"
        _run("-m", "stoker.launcher.bundle", "--zip", str(path), cwd=root, PYTHONPATH=str(root / "src"))
        return path.read_bytes()


def _run(*arguments: str, cwd: Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ImageError(f"{arguments[:2]} failed: {done.stderr.strip()[-1000:]}")


def _is_source(path: Path) -> bool:
    return "__pycache__" not in path.parts and not any(part.endswith(".egg-info") for part in path.parts)
