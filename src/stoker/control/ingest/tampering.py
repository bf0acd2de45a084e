"""Finds files of a task directory that the run changed and must not. Reported when it ends.

Only for diagnosis: no decision depends on these files. The processes of a task are recorded elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

from stoker.task import layout
from stoker.task.directory import RemoteAccess, TaskDir
from stoker.task.local_directory import UnsafePath


def found(directory: TaskDir, *, had_status: bool) -> list[str]:
    """Texts like `order.json is gone`. The reader of the journal reports the journal itself. `had_status`: a status was
    read before. Empty for a directory that is gone as a whole, and for a remote one: only its mirror is here."""
    if isinstance(directory, RemoteAccess) or not directory.exists():
        return []
    wanted: dict[str, Callable[[], object]] = {layout.TASK: directory.info, layout.ORDER: directory.order}
    if had_status:
        wanted[layout.STATUS] = directory.status
    texts = []
    for name, read in wanted.items():
        try:
            there = bool(directory.size(name))
        except UnsafePath as exc:
            texts.append(f"{name} is {exc.strerror}")
            continue
        except OSError as exc:
            texts.append(f"{name} cannot be read ({(exc.strerror or str(exc)).lower()})")
            continue
        if not there:
            texts.append(f"{name} is gone")
        elif read() is None:
            texts.append(f"{name} is not what was written there")
    return texts
