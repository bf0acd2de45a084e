"""A portable copy of the packages that training code, launchers and couriers need.

    python -m stoker.launcher.bundle DEST          unpacked, beneath DEST in a directory named by its content
    python -m stoker.launcher.bundle --zip PATH    one file, which Python runs as it is

The body's Python is often not the one Stoker is installed in, and a container has no Stoker at all. The bundle has the
package's `__init__`, `linux`, `task`, `launcher` and `sdk`, and in a separate folder, where training code does not find it,
`courier`; standard library only. Another bundle can be made from it in either form. Its name is the digest of its content, so
an existing one is used again, and a new version does not change the files of running processes.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import sys
import zipfile
from functools import lru_cache
from typing import Dict, List, Optional

from stoker.launcher import task_files
from stoker.task import formats

PACKAGES = ("linux", "task", "launcher", "sdk")
MARKER = "bundle.txt"
MAIN = "__main__.py"
ASIDE = "more/stoker"
"""Modules for Stoker's own processes only. Beside the others they would hide modules of an installed Stoker from training
code."""

_MAIN = """\
import sys

from stoker.launcher.entrypoints import main

sys.exit(main(sys.argv[1:]))
"""

_MORE = """

# This is a bundle: where Stoker itself is installed as well, its other packages are found there.
def _find_installed() -> None:
    import os
    import sys

    for folder in sys.path:
        found = os.path.join(folder, "stoker")
        if found not in __path__ and os.path.isfile(os.path.join(found, "__init__.py")):
            __path__.append(found)


_find_installed()
"""


@lru_cache(maxsize=None)
def digest() -> str:
    """The digest of the bundle's content, the same for both forms."""
    found = hashlib.sha256()
    content = _files()
    for name in sorted(content):
        found.update(f"{name}\0{len(content[name])}\0".encode() + content[name])
    return found.hexdigest()[:16]


@lru_cache(maxsize=None)
def zip_bytes() -> bytes:
    """The bundle as a zip. The same content gives the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in sorted(_files().items()):
            entry = zipfile.ZipInfo(name)  # its date is always 1980
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    return buffer.getvalue()


def write(destination: str) -> str:
    """Make the bundle in `destination` if it is not there, and return its path (for PYTHONPATH)."""
    path = os.path.join(os.path.abspath(destination), digest())
    if os.path.exists(os.path.join(path, MARKER)):
        return path
    os.makedirs(destination, exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _write_files(temporary, _files())
        os.rename(temporary, path)
        formats.sync_directory(os.path.dirname(path))
    except OSError:
        # Another process made it first. The name is the digest, so its content is the same.
        if not os.path.exists(os.path.join(path, MARKER)):
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def write_zip(path: str) -> None:
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "wb") as file:
        file.write(zip_bytes())
    os.replace(temporary, path)


def own() -> Optional[str]:
    """The unpacked bundle that this code runs from, if any."""
    root = _root()
    return root if os.path.exists(os.path.join(root, MARKER)) else None


def aside() -> str:
    """The folder of the modules for Stoker's own processes, in the bundle that this code runs from."""
    return os.path.join(_root(), *ASIDE.split("/"))


def _root() -> str:
    """The directory or the zip that contains the package."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(formats.__file__))))


@lru_cache(maxsize=None)
def _files() -> Dict[str, bytes]:
    root = _root()
    if os.path.isfile(root):
        with zipfile.ZipFile(root) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    if own() is not None:
        return {name: _read(os.path.join(root, name)) for name in [MARKER, *_modules(root)]}
    return _gathered(os.path.join(root, "stoker"))


def _gathered(source: str) -> Dict[str, bytes]:
    """The content, from an installed Stoker or its checkout."""
    content = {MAIN: _MAIN.encode()}
    content["stoker/__init__.py"] = _read(os.path.join(source, "__init__.py")) + _MORE.encode()
    for package in PACKAGES:
        for name in _modules(os.path.join(source, package)):
            content[f"stoker/{package}/{name}"] = _read(os.path.join(source, package, name))
    courier = os.path.join(source, "courier")
    for name in _modules(courier):
        content[f"{ASIDE}/courier/{name}"] = _read(os.path.join(courier, name))
    content[MARKER] = f"stoker {task_files.version()}: for processes whose Python has no Stoker\n".encode()
    return content


def _modules(folder: str) -> List[str]:
    """Paths of the Python files in a folder, sorted."""
    found = []
    for place, _, names in os.walk(folder):
        found += [
            os.path.relpath(os.path.join(place, name), folder) for name in names if name.endswith(".py")
        ]
    return sorted(found)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _write_files(root: str, content: Dict[str, bytes]) -> None:
    for name, data in content.items():
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def main(argv: List[str]) -> int:
    if len(argv) == 2 and argv[0] == "--zip":
        write_zip(argv[1])
        print(digest())
    elif len(argv) == 1 and not argv[0].startswith("-"):
        print(write(argv[0]))
    else:
        print("usage: python -m stoker.launcher.bundle DEST | --zip PATH", file=sys.stderr)
        return 64
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
