"""Small file systems, for tests that fill a disk."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_disk(mount: Path, size: str) -> Iterator[Path]:
    """A file system of this size (`24m`) at a new directory. CalledProcessError: this user may not mount."""
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount)]
    subprocess.run(command, check=True, capture_output=True)
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)
