"""How each test image is made. Images with Python share its layers, so they are stored once."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from recipe import debian, python, stoker

from stoker.images import Registry
from stoker.images.build import Cache, Image, Settings, assemble
from stoker.images.layers import Layer, LayerTree

HERE = Path(__file__).parent
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
REPOSITORIES = "stoker-test"
PYTHON = python.VERSION
"""The version in every image with Python."""


def build_test_images(push_to: str, cache: Cache | None = None) -> dict[str, str]:
    """Build all test images and push them to `push_to` (HOST:PORT); references by name, tagged by content."""
    cache = cache or Cache()
    references: dict[str, str] = {}
    with Registry() as registry:
        for name, recipe in _RECIPES.items():
            image = recipe(cache)
            reference = f"{push_to}/{REPOSITORIES}/{name}:{image.digest.partition(':')[2][:12]}"
            if registry.digest(reference) != image.digest:
                registry.push(
                    image, reference, mount_from=[f"{REPOSITORIES}/{other}" for other in references]
                )
            references[name] = reference
    return references


def build(name: str, cache: Cache | None = None) -> Image:
    return _RECIPES[name](cache or Cache())


def _root(cache: Cache) -> Image:
    return assemble(_python(cache), Settings(cmd=("python3",), env={"PATH": PATH}))


def _nonroot(cache: Cache) -> Image:
    tree = LayerTree()
    tree.file("etc/passwd", f"{_USERS.passwd}app:x:1000:1000::/home/app:/bin/sh\n")
    tree.file("etc/group", f"{_USERS.group}app:x:1000:\n")
    tree.directory("home/app", owner=1000)
    settings = Settings(cmd=("python3",), user="app", workdir="/home/app", env={"PATH": PATH})
    return assemble([*_python(cache), _small(cache, "nonroot", tree)], settings)


def _conda(cache: Cache) -> Image:
    packages = debian.read_lock(stoker.lock("amd64"))["python"]

    def make() -> LayerTree:
        found = debian.unpack(packages)
        found.add(python.compiled(found, stoker.lock("amd64")))
        moved = LayerTree()
        for name, entry in found:
            for part in ("usr/bin", "usr/lib/python3"):
                name = name.replace(part, f"opt/conda/{part[4:]}", 1) if name.startswith(part) else name
            if not entry.is_directory:
                moved.put(name, entry)
        moved.link("opt/conda/bin/python", "python3")
        return moved

    layer = cache.layer(stoker.key("conda", debian.key_of(packages), _HERE), make, "python in /opt/conda")
    env = {"PATH": f"/opt/conda/bin:{PATH}", "CONDA_PREFIX": "/opt/conda"}
    return assemble([stoker.base(cache), layer], Settings(cmd=("python",), env=env))


def _entrypoint(cache: Cache) -> Image:
    tree = LayerTree()
    tree.file("app/entry.sh", (HERE / "files/entry.sh").read_bytes(), 0o755)
    tree.file("app/train.py", (HERE / "files/train.py").read_bytes())
    settings = Settings(
        entrypoint=("/app/entry.sh",), workdir="/app", env={"PATH": PATH, "FLAVOUR": "entrypoint"}
    )
    return assemble([*_python(cache), _small(cache, "entrypoint", tree)], settings)


def _nopython(cache: Cache) -> Image:
    (package,) = debian.read_lock(HERE / "packages.amd64.lock")["busybox"]

    def make() -> LayerTree:
        tree = LayerTree()
        program = debian.unpack([package]).get("usr/bin/busybox")
        assert program is not None
        tree.put("bin/busybox", program)
        for name in _applets(program.read()):
            tree.link(f"bin/{name}", "busybox")
        for name in ("tmp", "proc", "sys", "dev", "root"):
            tree.directory(name, 0o1777 if name == "tmp" else 0o755)
        tree.file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")
        return tree

    layer = cache.layer(stoker.key("busybox", package.sha256, _HERE), make, "debian: busybox-static")
    return assemble([layer], Settings(cmd=("sh",), env={"PATH": "/bin"}))


def _readonly(cache: Cache) -> Image:
    tree = LayerTree()
    tree.directory("job", owner=1001)
    settings = Settings(cmd=("python3",), user="1001:1001", workdir="/job", env={"PATH": PATH})
    return assemble([*_python(cache), _small(cache, "readonly", tree)], settings)


def _train(cache: Cache) -> Image:
    names = python.closure(HERE / "train.in", stoker.ROOT / "requirements/lock.txt", "amd64")
    wheels = stoker.wheels(cache, names, "amd64", "numpy, scikit-learn")
    env = {"PATH": PATH, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    layers = [*_python(cache), _cxx(cache), wheels, _named_python(cache)]
    return assemble(layers, Settings(cmd=("python3",), env=env))


def _openmpi(cache: Cache) -> Image:
    packages = debian.read_lock(HERE / "packages.amd64.lock")["openmpi"]

    def make() -> LayerTree:
        tree = debian.unpack(packages)
        # As Debian's alternatives would do.
        for name in ("mpirun", "mpiexec"):
            tree.link(f"usr/bin/{name}", "orterun")
        return tree

    layer = cache.layer(stoker.key("openmpi", debian.key_of(packages), _HERE), make, "debian: openmpi-bin")
    layers = [*_python(cache), _cxx(cache), _named_python(cache), layer]
    return assemble(layers, Settings(cmd=("python3",), env={"PATH": PATH, "OMP_NUM_THREADS": "1"}))


_RECIPES: dict[str, Callable[[Cache], Image]] = {
    "root": _root,
    "nonroot": _nonroot,
    "conda": _conda,
    "entrypoint": _entrypoint,
    "nopython": _nopython,
    "readonly": _readonly,
    "train": _train,
    "openmpi": _openmpi,
    "stoker": stoker.image,
}
NAMES = tuple(_RECIPES)


class _Users(NamedTuple):
    passwd: str
    group: str


_USERS = _Users(
    "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/nonexistent:/bin/false\n", "root:x:0:\n"
)


def _python(cache: Cache) -> list[Layer]:
    return [stoker.base(cache), stoker.runtime(cache)]


def _cxx(cache: Cache) -> Layer:
    packages = debian.read_lock(HERE / "packages.amd64.lock")["cxx"]
    return cache.layer(
        stoker.key("cxx", debian.key_of(packages)), lambda: debian.unpack(packages), "debian: libstdc++"
    )


def _named_python(cache: Cache) -> Layer:
    """The name `python`, which most scripts use."""
    tree = LayerTree()
    tree.link("usr/bin/python", "python3")
    return _small(cache, "python", tree)


def _small(cache: Cache, name: str, tree: LayerTree) -> Layer:
    """A small layer whose content is its cache key."""
    content = [f"{path} {entry.mode:o} {entry.uid} {entry.read()!r}" for path, entry in tree]
    return cache.layer(stoker.key(name, *content), lambda: tree, name)


def _applets(program: bytes) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "busybox"
        path.write_bytes(program)
        path.chmod(0o755)
        said = subprocess.run([path, "--list"], capture_output=True, text=True, check=True).stdout
    return [name for name in said.split() if name != "busybox"]


_HERE = Path(__file__).read_text()
"""A part of the layers' cache keys; read when the module is loaded."""
