"""A portable copy of what training code and launchers need: `python -m stoker.launcher.bundle DEST`.

The body's Python is often not the one Stoker is installed in. It finds `stoker.report` and the others in a
bundle: the package's `__init__`, `task`, `launcher` and `sdk`, standard library only. A bundle lies in a
directory named by its content, so making it again costs nothing and a new version never disturbs the
processes that still use an old one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from typing import Dict, List, Optional

from stoker.launcher import files
from stoker.task import formats

PACKAGES = ("task", "launcher", "sdk")
MARKER = "bundle.txt"

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


def write(destination: str) -> str:
    """Make the bundle beneath `destination` if it is not there, and return its path (for PYTHONPATH)."""
    content = _files()
    digest = hashlib.sha256()
    for name in sorted(content):
        digest.update(f"{name}\0{len(content[name])}\0".encode() + content[name])
    path = os.path.join(os.path.abspath(destination), digest.hexdigest()[:16])
    if os.path.exists(os.path.join(path, MARKER)):
        return path
    os.makedirs(destination, exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _write_files(temporary, content)
        os.rename(temporary, path)
        formats.sync_directory(os.path.dirname(path))
    except OSError:
        # Somebody else was faster: theirs is as good, being named by its content.
        if not os.path.exists(os.path.join(path, MARKER)):
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def own() -> Optional[str]:
    """The bundle that this code itself runs from, if it does."""
    root = os.path.dirname(_package())
    return root if os.path.exists(os.path.join(root, MARKER)) else None


def _package() -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(formats.__file__)))


def _files() -> Dict[str, bytes]:
    source = _package()
    content = {"stoker/__init__.py": _read(os.path.join(source, "__init__.py"))}
    if own() is None:
        content["stoker/__init__.py"] += _MORE.encode()
    for package in PACKAGES:
        for name in sorted(os.listdir(os.path.join(source, package))):
            if name.endswith(".py"):
                content[f"stoker/{package}/{name}"] = _read(os.path.join(source, package, name))
    content[MARKER] = f"stoker {files.version()}: for processes whose Python has no Stoker\n".encode()
    return content


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _write_files(root: str, files: Dict[str, bytes]) -> None:
    for name, data in files.items():
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def main(argv: List[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m stoker.launcher.bundle DEST", file=sys.stderr)
        return 64
    print(write(argv[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
