"""The plan of a pull, made before the first byte: where each file goes, and which are here already."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stoker.errors import Conflict, Refused

LONGEST = 255
"""Bytes that a name may have on Linux."""


class Plan:
    """One file to download. Its unfinished bytes are in `part` beside it."""

    __slots__ = ("is_here", "parent", "part", "path", "sha256", "size", "target")

    def __init__(self, path: str, parent: Path, size: int, sha256: str | None) -> None:
        """`parent`: the directory of the file."""
        self.path = path
        self.parent = parent
        self.target = parent / path.rpartition("/")[2]
        self.size = size
        self.sha256 = sha256
        self.part = self.target
        self.is_here = False
        """Whether the same file is in place already."""

    def begun(self) -> int:
        """Bytes that an earlier pull left in `part`; 0 for anything but a regular file."""
        try:
            info = self.part.lstat()
        except OSError:
            return 0
        return info.st_size if stat.S_ISREG(info.st_mode) else 0


def plan_all(folder: Path, entries: Iterable[Mapping[str, Any]], *, force: bool) -> list[Plan]:
    """Plans for files as the server lists them. Raises Conflict where another file is in the way, unless `force`."""
    plans = []
    targets: set[str] = set()
    parents: dict[str, Path] = {}
    for entry in entries:
        path = str(entry["path"])
        check_path(path)
        directory = path.rpartition("/")[0]
        parent = parents.setdefault(directory, folder / directory)
        plan = Plan(path, parent, int(entry["size"]), entry.get("sha256"))
        if path in targets:
            raise Refused(f"the server names {path!r} twice", hint="Nothing was written.")
        targets.add(path)
        plans.append(plan)
    for plan in plans:
        plan.part = plan.parent / _part_name(plan.path, targets)
        plan.is_here = _is_here(plan, force)
    return plans


def check_path(path: str) -> None:
    """Refuses a path that leaves the folder: the server is not trusted."""
    parts = path.split("/")
    if not path or "\0" in path or "\\" in path or any(part in ("", ".", "..") for part in parts):
        raise Refused(f"the server names an unsafe path {path!r}", hint="Nothing was written for it.")


def digest(path: Path) -> str:
    import hashlib  # lazy: only where there is something to check

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _part_name(path: str, targets: set[str]) -> str:
    """The same name in every pull of the same files, and different from all of them."""
    directory, slash, name = path.rpartition("/")
    found = f"{name}.part"
    if len(os.fsencode(found)) > LONGEST - 1:
        import hashlib  # lazy: names are hardly ever so long

        found = f"{hashlib.sha256(os.fsencode(name)).hexdigest()}.part"
    while f"{directory}{slash}{found}" in targets:
        found += "~"
    return found


def _is_here(plan: Plan, force: bool) -> bool:
    try:
        info = plan.target.stat()
    except OSError:  # missing or unreadable
        return False
    same = (
        stat.S_ISREG(info.st_mode)
        and info.st_size == plan.size
        and plan.sha256 is not None
        and digest(plan.target) == plan.sha256
    )
    if not same and not force:
        raise Conflict(
            f"{plan.target} exists and differs from the run's file",
            hint="Use --force to replace it, or -o DIR.",
        )
    return same
