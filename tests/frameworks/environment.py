"""Make the environment that has the frameworks, once for each content of its lock file, and print where it is.

    environment.py               an environment of the Python that runs this
    environment.py --for 3.11    a folder for the PYTHONPATH of such a Python, wherever that is: in an image

Outside the checkout: it is some gigabytes, and the same for every checkout of this machine. Where both are for the same
version of Python, there is one.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "frameworks.txt"
READY = ".ready"
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--for", dest="version", metavar="VERSION")
    version = parser.parse_args().version
    print(_obtain(version) if version not in (None, OWN) else _own(version))
    return 0


def _own(version: str | None) -> Path:
    path = _obtain(None)
    return path if version is None else path / "lib" / f"python{version}" / "site-packages"


def _obtain(version: str | None) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stoker-frameworks"
    cache.mkdir(parents=True, exist_ok=True)
    found = hashlib.sha256(LOCK.read_bytes() + (version or sys.version).encode()).hexdigest()[:16]
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = cache / found
        if not (path / READY).exists():
            _make(path, version)
    return path


def _make(path: Path, version: str | None) -> None:
    shutil.rmtree(path, ignore_errors=True)
    uv = str(Path(sys.executable).parent / "uv")
    lock = ["--require-hashes", "-r", str(LOCK)]
    if version is None:
        commands = [
            [uv, "venv", "--quiet", "--python", sys.executable, str(path)],
            # Where it is mounted read-only, nobody could keep what compiling made.
            _install(uv, "--compile-bytecode", "--python", str(path / "bin" / "python"), *lock),
        ]
    else:
        target = ["--target", str(path), "--python-version", version, "--only-binary", ":all:"]
        commands = [_install(uv, "--python", sys.executable, *target, *lock)]
    for command in commands:
        subprocess.run(command, check=True, stdout=sys.stderr)
    (path / READY).touch()


def _install(uv: str, *arguments: str) -> list[str]:
    return [uv, "pip", "install", "--quiet", "--system-certs", *arguments]


if __name__ == "__main__":
    sys.exit(main())
