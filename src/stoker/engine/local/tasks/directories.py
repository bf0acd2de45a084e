"""The task directories of a home: their paths, their creation and removal.

    tasks/RUN/ATTEMPT/TASK      the task of that name, at its newest incarnation
    tasks/RUN/ATTEMPT/TASK.N    the files of incarnation N, kept until the attempt is removed
    tasks/RUN/ATTEMPT.kept      an ended attempt whose files are kept for a while

User code owns everything inside a task directory, so nothing in it is trusted: links are unlinked, never followed,
and unreadable directories are made readable first.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from stoker.engine.base import ASIDE_FOR
from stoker.errors import EngineError
from stoker.linux import idle_throttle
from stoker.linux.descriptors import Closing
from stoker.task import formats, layout
from stoker.task.local_directory import LocalTaskDir, UnsafePath

_DEPTH = 64
_DISCARDED = ".removed"
_ASIDE = ".kept"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, order=True)
class TaskPlace:
    run: str
    attempt: int
    task: str

    def key(self) -> tuple[str, int, str]:
        return self.run, self.attempt, self.task


def path_of(tasks: Path, place: TaskPlace) -> Path:
    """The directory of a task. Names that could lead elsewhere are refused."""
    for name in (place.run, place.task):
        if not _NAME.fullmatch(name):
            raise EngineError(
                f"{name!r} cannot name a run or a task", hint="Use letters, digits, '-' and '_'."
            )
    return tasks / place.run / str(int(place.attempt)) / place.task


def create(directory: Path, info: formats.TaskInfo) -> None:
    """Prepare the directory for a launcher. May be repeated after a crash at any point: task.json is written last."""
    make_directory(directory, 0o700)
    directory.chmod(0o700)
    for name in layout.DIRECTORIES:
        if name == layout.CODE and info.common is not None:
            _share_folder(directory, Path(info.common))
        else:
            (directory / name).mkdir(mode=0o755, exist_ok=True)
    _share_turns(directory)
    formats.write_json(str(directory / layout.TASK), info.to_json(), mode=0o600)


def common_of(attempt: Path) -> Path:
    """What the tasks of an attempt share."""
    return attempt / layout.COMMON


def shared_folder(attempt: Path) -> str | None:
    """The working folder of all tasks of an attempt. None: each has its own."""
    common = common_of(attempt)
    return str(common / layout.CODE) if common.is_dir() and not common.is_symlink() else None


def _share_folder(directory: Path, common: Path) -> None:
    folder, link = common / layout.CODE, directory / layout.CODE
    make_directory(common, 0o700)
    folder.mkdir(mode=0o755, exist_ok=True)
    if not link.is_symlink():
        with contextlib.suppress(FileNotFoundError):
            link.rmdir()
        link.symlink_to(os.path.relpath(folder, directory))


def _share_turns(directory: Path) -> None:
    """Share one lock file among the tasks of an attempt. By a hard link, because a task cannot see the other directories.
    If the link is not possible, the task has its own lock."""
    own = directory / layout.TURNS
    others = [
        other / layout.TURNS
        for other in _directories(directory.parent)
        if other != directory and _NAME.fullmatch(other.name.partition(".")[0])
    ]
    if not others or own.exists():
        return
    theirs = next((path for path in others if path.exists()), others[0])
    with contextlib.suppress(OSError):
        os.close(idle_throttle.open_turns(str(theirs)))
        os.link(theirs, own, follow_symlinks=False)


def archive(directory: Path, incarnation: int) -> Path:
    """Move a dead incarnation aside. The caller has proof that none of its processes runs. Its directory may be gone."""
    target = directory.with_name(f"{directory.name}.{incarnation}")
    number = incarnation
    while target.exists():
        number += 1
        target = directory.with_name(f"{directory.name}.{number}")
    with contextlib.suppress(FileNotFoundError):
        directory.rename(target)
    return target


def scan(tasks: Path, skip: Container[str] = ()) -> Iterator[tuple[TaskPlace, Path]]:
    """All task directories except archived ones. Directories with other names are ignored, and so are the runs in
    `skip`."""
    for run in _directories(tasks):
        if run.name in skip:
            continue
        for attempt in _directories(run):
            yield from scan_attempt(run.name, attempt)


def scan_attempt(run: str, attempt: Path) -> Iterator[tuple[TaskPlace, Path]]:
    """The task directories of one attempt."""
    if attempt.name.isdecimal():
        for task in _directories(attempt):
            if _NAME.fullmatch(task.name):
                yield TaskPlace(run, int(attempt.name), task.name), task


def read_info(directory: Path) -> formats.TaskInfo | None:
    """task.json, or None if it is missing or invalid (a crash before it was written, or user code changed it)."""
    try:
        return LocalTaskDir(str(directory)).info()
    except (UnsafePath, OSError, TypeError):
        return None


def remove_tree(path: Path) -> None:
    """Delete a directory with any content and depth. An absent one is success.

    Raises OSError when something cannot be deleted even after its directory was made writable.
    """
    try:
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with Closing(parent):
        _remove_entry(parent, path.name, top=None, depth=0)


def discard(attempt: Path) -> None:
    """Remove a whole attempt. It is renamed first, so that a crash leaves no half of a task."""
    aside = attempt.with_name(f"{attempt.name}{_DISCARDED}")
    try:
        if aside.exists():
            remove_tree(aside)
        attempt.rename(aside)
    except FileNotFoundError:
        pass
    remove_tree(aside)
    remove_empty(attempt.parent)


def aside(attempt: Path) -> Path:
    return attempt.with_name(f"{attempt.name}{_ASIDE}")


def set_aside(attempt: Path) -> None:
    """Keep the files of a whole attempt without its tasks. May be repeated. Also discards what was kept long enough."""
    kept = aside(attempt)
    for task in _directories(attempt):
        remove_tree(task / layout.SECRETS)  # also those of earlier incarnations, whatever the entry is
    try:
        attempt.rename(kept)
        os.utime(kept)  # the time counts from now
    except FileNotFoundError:
        pass
    discard_old(attempt.parent.parent)


def discard_old(tasks: Path) -> None:
    """Remove attempts that were kept long enough. If the clock jumped back they are kept longer."""
    for run in _directories(tasks):
        for attempt in _directories(run):
            if attempt.name.endswith(_ASIDE):
                # A container may leave files of another user that cannot be removed; they stay.
                with contextlib.suppress(OSError):
                    if time.time() - attempt.stat().st_mtime > ASIDE_FOR:
                        remove_tree(attempt)
                        remove_empty(run)


def discard_unfinished(tasks: Path) -> None:
    """Complete removals that a crash interrupted."""
    for run in _directories(tasks):
        for attempt in _directories(run):
            if attempt.name.endswith(_DISCARDED):
                remove_tree(attempt)
                remove_empty(run)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """mkdir -p, also while another thread removes the empty parent (`remove_empty`)."""
    for _ in range(10):
        try:
            path.mkdir(mode=mode, parents=True, exist_ok=True)
            return
        except FileNotFoundError:
            continue
    path.mkdir(mode=mode, parents=True, exist_ok=True)


def remove_empty(path: Path) -> None:
    """rmdir if nothing is in it."""
    try:
        path.rmdir()
    except OSError:
        pass


def _directories(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove_entry(parent: int, name: str, top: int | None, depth: int) -> None:
    try:
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(info.st_mode):
        os.unlink(name, dir_fd=parent)
        return
    _make_accessible(parent, name, info)
    if top is not None and depth > _DEPTH:
        # Too deep for descriptors and stack: moved to the top level, where the next round finds it.
        os.rename(name, f".deep-{info.st_ino}", src_dir_fd=parent, dst_dir_fd=top)
        return
    with Closing(
        os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    ) as fd:
        while names := os.listdir(fd):
            for child in names:
                _remove_entry(fd, child, fd if top is None else top, depth + 1)
    os.rmdir(name, dir_fd=parent)


def _make_accessible(parent: int, name: str, info: os.stat_result) -> None:
    """Make a directory readable and writable for its owner, so that it can be emptied."""
    if stat.S_IMODE(info.st_mode) & 0o700 != 0o700 and info.st_uid == os.geteuid():
        # chmod follows links, but the name was a directory a moment ago, and no process of the task is left that
        # could replace it.
        os.chmod(name, 0o700, dir_fd=parent)
