"""Make the environment of the frameworks, once for each content of its lock file, and print its path.

    environment.py               an environment of the Python that runs this
    environment.py --for 3.11    a folder for the PYTHONPATH of such a Python, for example in an image

It is outside the checkout, because it takes some gigabytes and is the same for every checkout of this
machine. If both need the same version of Python, there is only one.
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
            # Compiled now, because bytecode cannot be written where it is mounted read-only.
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
