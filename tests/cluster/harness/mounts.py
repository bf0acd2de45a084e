"""Persistent mount namespaces, and all mounts below a directory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from harness.errors import command

__all__ = ["below", "enter", "isolate", "unmount"]

_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


def isolate(namespace: Path, instead: Mapping[Path, Path]) -> None:
    """Make a mount namespace, held by a file, in which each path of `instead` is replaced by another
    directory.

    Mounts inside are visible only there. They go when the file is unmounted and the processes inside have
    ended.
    """
    if os.path.ismount(namespace):
        return
    folder = namespace.parent
    folder.mkdir(parents=True, exist_ok=True)
    if not os.path.ismount(folder):
        # The kernel refuses to mount a namespace where it would propagate into itself.
        command(["mount", "--bind", folder, folder])
        command(["mount", "--make-private", folder])
    namespace.touch()
    command(["unshare", f"--mount={namespace}", "--propagation", "slave", "true"])
    for seen, real in instead.items():
        seen.mkdir(parents=True, exist_ok=True)
        real.mkdir(parents=True, exist_ok=True)
        command([*enter(namespace), "mount", "--bind", real, seen])


def enter(namespace: Path) -> list[str | Path]:
    """The command prefix that runs a program in the namespace."""
    return ["nsenter", f"--mount={namespace}", "--"]


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
