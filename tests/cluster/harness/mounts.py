"""Everything mounted below a directory, and taking it down."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = ["below", "unmount"]

_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


def below(root: Path) -> list[str]:
    """Mount points below `root`, innermost first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place = line.split()[4].encode().decode("unicode_escape")
        if place.startswith(f"{root}/"):
            found.append(place)
    return sorted(found, key=len, reverse=True)


def unmount(root: Path) -> None:
    for place in below(root):
        if _libc.umount2(place.encode(), _DETACH) and ctypes.get_errno() not in (2, 22):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), place)
