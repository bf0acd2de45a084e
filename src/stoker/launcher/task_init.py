"""`init`: makes a task directory and unpacks the launcher's code, in a container that ends before the others start.

Its user may have no name and need not own the directory (the mount point of a volume belongs to root). It may run again: after
a restart of the machine the volume is still there, with everything a launcher wrote into it.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, Mapping

from stoker.launcher import bundle, task_files
from stoker.task import container_layout, formats, layout

BAD_INPUT = 65


def main(task: str, directory: str, place: str, part: str = "") -> int:
    try:
        return prepare(task, directory, place, part)
    except OSError as exc:
        print(f"stoker init: {exc.strerror}: {exc.filename or directory}", file=sys.stderr)
        return 74 if exc.errno == errno.ENOSPC else 73


def prepare(task: str, directory: str, place: str, part: str = "") -> int:
    """Idempotent, also after it was interrupted: existing files are not changed.

    `part`: the task's part of a shared volume. Made here, it belongs to the task's user. The kubelet would make it for root,
    and the task could not remove it.
    """
    raw = task_files.read_json(task, mounted=True) or {}
    try:
        formats.TaskInfo.from_json(raw)
    except TypeError as exc:
        print(f"stoker init: {task} is not a task: {exc}", file=sys.stderr)
        return BAD_INPUT
    _make_directory(directory, raw)
    if part:
        _make_part(part)
    path = bundle.write(place)
    _link(os.path.basename(path), os.path.join(place, os.path.basename(container_layout.CURRENT)))
    return 0


def _make_directory(directory: str, task: Mapping[str, Any]) -> None:
    os.makedirs(directory, mode=0o700, exist_ok=True)
    try:
        os.chmod(directory, 0o700)
    except PermissionError:
        # The mount point of a volume, which this user may write to. There are no other users in the pod.
        pass
    for name in layout.DIRECTORIES:
        os.makedirs(os.path.join(directory, name), mode=0o755, exist_ok=True)
    path = os.path.join(directory, layout.TASK)
    if task_files.read_json(path) != task:
        formats.write_json(path, task, mode=0o600, durable=True)


def _make_part(part: str) -> None:
    run = os.path.dirname(part)
    try:
        os.mkdir(run)
        # With the mode of the volume, as the kubelet does it: tasks of one run may have different users.
        os.chmod(run, os.stat(os.path.dirname(run)).st_mode & 0o7777)
    except FileExistsError:
        pass
    for name in layout.LASTING:
        os.makedirs(os.path.join(part, name), mode=0o700, exist_ok=True)


def _link(target: str, path: str) -> None:
    try:
        if os.readlink(path) == target:
            return
    except OSError:
        pass
    temporary = f"{path}.{os.getpid()}.tmp"
    task_files.unlink(temporary)
    os.symlink(target, temporary)
    os.replace(temporary, path)
