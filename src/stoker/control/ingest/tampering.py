"""What a run made of the files in its task directory that are not its own to write: said when it ends.

Nothing depends on it. Which process a task has is recorded elsewhere, and a run ends whatever is in its directory; but a
person who looks for the reason of an odd end should find it.
"""

from __future__ import annotations

from collections.abc import Callable

from stoker.task import layout
from stoker.task.directory import RemoteAccess, TaskDir
from stoker.task.local_directory import UnsafePath


def found(directory: TaskDir, *, had_status: bool) -> list[str]:
    """`order.json is gone`, for each. Of the journal the reader of the journal says it. `had_status`: there was one. Nothing of
    a directory that is gone as a whole, or that is on another machine: of that one only copies are here."""
    if isinstance(directory, RemoteAccess) or not directory.exists():
        return []
    wanted: dict[str, Callable[[], object]] = {layout.TASK: directory.info, layout.ORDER: directory.order}
    if had_status:
        wanted[layout.STATUS] = directory.status
    said = []
    for name, read in wanted.items():
        try:
            there = bool(directory.size(name))
        except UnsafePath as exc:
            said.append(f"{name} is {exc.strerror}")
            continue
        except OSError as exc:
            said.append(f"{name} cannot be read ({(exc.strerror or str(exc)).lower()})")
            continue
        if not there:
            said.append(f"{name} is gone")
        elif read() is None:
            said.append(f"{name} is not what was written there")
    return said
