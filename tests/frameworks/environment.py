"""Make the environment that has the frameworks, once for each content of its lock file, and print where it is.

Outside the checkout: it is some gigabytes, and the same for every checkout of this machine.
"""

from __future__ import annotations

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


def main() -> int:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stoker-frameworks"
    cache.mkdir(parents=True, exist_ok=True)
    found = hashlib.sha256(LOCK.read_bytes() + sys.version.encode()).hexdigest()[:16]
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = cache / found
        if not (path / READY).exists():
            _make(path)
    print(path)
    return 0


def _make(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    uv = str(Path(sys.executable).parent / "uv")
    python = ["--python", str(path / "bin" / "python")]
    lock = ["--require-hashes", "-r", str(LOCK)]
    for command in (
        [uv, "venv", "--quiet", "--python", sys.executable, str(path)],
        [uv, "pip", "install", "--quiet", "--system-certs", *python, *lock],
    ):
        subprocess.run(command, check=True, stdout=sys.stderr)
    (path / READY).touch()


if __name__ == "__main__":
    sys.exit(main())
