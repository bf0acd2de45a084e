"""Keeps the working folder of a run from one generation, attempt or resume to the next.

`RunRow.folder` describes what is kept: {"digest", "files", "bytes"}, the newest file, the time, the attempt, and what was left
out: files over the budget, and what `.stokerignore` names.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from stoker.control.context import Context
from stoker.control.state import LiveRun, LiveTask
from stoker.errors import StokerError
from stoker.spec.kept_files import FileFacts, KeepRules
from stoker.spec.tree import Tree
from stoker.store.rows import AddEvent, Change, EventRow
from stoker.task.units import readable_size
from stoker.transfer.folder import KeptFolder, Span, carry_folder, ignore_lines, without_deleted
from stoker.transfer.merge import merge, view_of

log = logging.getLogger(__name__)

SHARE = 10
"""The default budget is this part of the free disk."""
NAMED = 20
"""Files that are named of those that were left out."""


class FolderKeeper:
    """Runs in the loop's thread."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="folder")
        """Separate from the threads that read tasks: large files take long."""

    async def keep_between(
        self, live: LiveRun, tasks: Sequence[LiveTask], changes: list[Change]
    ) -> dict[str, Any] | None:
        """`keep` between two generations, for the tasks that have ended. A shared folder stays there anyway."""
        return None if live.alone or _shared(live) else await self.keep(live, changes, tasks)

    async def keep(
        self, live: LiveRun, changes: list[Change], tasks: Sequence[LiveTask] | None = None
    ) -> dict[str, Any] | None:
        """Store the folder as the ended processes left it: the new value of `RunRow.folder`. None: as it is. `tasks`: all
        if not given."""
        if not self._applies(live):
            return None
        ended = {task.name for task in (live.tasks.values() if tasks is None else tasks)}
        work = partial(self._keep, live, ended)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except (StokerError, OSError) as exc:
            text = f"the working folder could not be kept: {getattr(exc, 'message', None) or exc}"
            changes.append(AddEvent(EventRow(live.id, time.time(), "warning", text)))
            return None
        if found is None:
            return None
        for text in _warnings(found):
            changes.append(AddEvent(EventRow(live.id, time.time(), "warning", text)))
        before = live.row.folder
        if before is None or before["digest"] != found["digest"]:
            live.progressed = True
            if before is not None:
                self._ctx.dropped.add(before["digest"])
        return found

    def _applies(self, live: LiveRun) -> bool:
        assert live.attempt is not None
        started = live.attempt.started_at is not None
        return started and live.row.code is not None and live.job.launcher != "none"

    def _keep(self, live: LiveRun, ended: Set[str]) -> dict[str, Any] | None:
        assert live.attempt is not None and live.row.code is not None
        blobs, before = self._ctx.blobs, live.row.folder
        code = blobs.tree(live.row.code)
        rules = KeepRules(live.job.keep_files, ignore_lines(blobs, code))
        if rules.none:
            return None
        base = blobs.tree(before["digest"]) if before else Tree()
        apart = bool(before and before.get("apart"))
        budget = rules.budget if rules.budget is not None else self._share()
        span = Span(live.attempt.started_at or live.attempt.created_at, time.time())
        found: dict[int, KeptFolder] = {}
        for place, task in enumerate(live.tasks.values()):
            if task.name not in ended:
                continue
            if found and _shared(live):
                break
            given = view_of(base, place) if apart else base
            kept = self._carry(live, task, rules=rules, budget=budget, code=code, before=given, span=span)
            if kept is not None:
                found[place] = kept
                if not live.alone:
                    task.folder = blobs.put_tree(kept.tree)
                budget = max(0, budget - _fresh(kept.tree, given))
        nothing = not any(kept.tree.files or kept.left or kept.ignored for kept in found.values())
        if not found or (nothing and before is None):
            return None
        return self._described(live, found, base, span, apart=apart)

    def _carry(self, live: LiveRun, task: LiveTask, **how: Any) -> KeptFolder | None:
        if task.ingester is None:
            return None
        try:
            return carry_folder(task.ingester.directory, self._ctx.blobs, **how)
        except (StokerError, OSError) as exc:
            if live.alone:
                raise
            log.info("run %s: the folder of %s cannot be kept: %s", live.id, task.name, exc)
            return None

    def _described(
        self, live: LiveRun, found: Mapping[int, KeptFolder], base: Tree, span: Span, *, apart: bool
    ) -> dict[str, Any]:
        assert live.attempt is not None
        blobs = self._ctx.blobs
        newest = max(found.values(), key=lambda kept: kept.newest_at)
        left = [fact for kept in found.values() for fact in kept.left]
        ignored = list(dict.fromkeys(path for kept in found.values() for path in kept.ignored))
        diverged: tuple[str, ...] = ()
        if live.alone or _shared(live):
            tree = newest.tree
        else:
            given = [(place, kept.tree) for place, kept in sorted(found.items())]
            merged = merge(given if apart else without_deleted(given, base), base, parted=apart)
            tree, diverged = merged.tree, merged.apart
        value: dict[str, Any] = {
            "digest": blobs.put_tree(tree),
            "files": len(tree.files),
            "bytes": tree.size,
            "newest": newest.newest,
            "newest_at": newest.newest_at,
            "at": span.ended,
            "attempt": live.attempt.number,
        }
        if diverged:
            value["apart"] = list(diverged[:NAMED])
        if left:
            value["left"] = _left(left)
        if ignored:
            value["ignored"] = ignored[:NAMED]
        return value

    def _share(self) -> int:
        root = self._ctx.blobs.root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return shutil.disk_usage(root).free // SHARE


def _warnings(folder: Mapping[str, Any]) -> list[str]:
    found = []
    if left := folder.get("left"):
        names = ", ".join(f"{one['path']} ({readable_size(one['bytes'])})" for one in left["named"][:3])
        found.append(
            f"the working folder is over its budget: {_files(left['files'])} of {readable_size(left['bytes'])} "
            f"are not kept, among them {names}; `keep_files` in the job file raises it"
        )
    if ignored := folder.get("ignored"):
        found.append(f"not kept because .stokerignore names them: {', '.join(ignored[:5])}")
    if apart := folder.get("apart"):
        found.append(
            f"tasks wrote different files under the same name: {', '.join(apart[:5])}; "
            "the first task's is kept there, the others' under task-N/"
        )
    return found


def _left(files: list[FileFacts]) -> dict[str, Any]:
    files = sorted(files, key=lambda fact: (-fact.size, fact.path))
    return {
        "files": len(files),
        "bytes": sum(fact.size for fact in files),
        "named": [{"path": fact.path, "bytes": fact.size} for fact in files[:NAMED]],
    }


def _shared(live: LiveRun) -> bool:
    """Whether its tasks have one folder."""
    return any(
        task.ingester is not None and task.ingester.directory.shared_folder is not None
        for task in live.tasks.values()
    )


def _fresh(tree: Tree, given: Tree) -> int:
    """Bytes that one task adds to what was kept before."""
    known = {(file.path, file.sha256) for file in given.files}
    return sum(file.size for file in tree.files if (file.path, file.sha256) not in known)


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"
