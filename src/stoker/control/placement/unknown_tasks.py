"""Tasks that the engines show and the database does not know: an older backup was restored.

They may be wanted, since only the lost rows could say otherwise. So they run on untouched, and their directories keep
what they write. `stoker server status` and `stoker doctor` name them, and `stoker backup forget` ends them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

from stoker.control.context import Context
from stoker.control.fleet import FleetMember
from stoker.engine.base import Observation, Presence
from stoker.errors import EngineError

log = logging.getLogger(__name__)

_GRACE = timedelta(seconds=30)
"""The job's own grace is not known: it was in the lost rows."""


class UnknownTasks:
    """Belongs to the loop's thread."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._seen: dict[str, list[Observation]] = {}
        """By engine: the unknown tasks of the last observation."""
        self._logged: set[tuple[str, int]] = set()

    def look(self, member: FleetMember, seen: Sequence[Observation]) -> None:
        self._seen[member.name] = [one for one in seen if one.presence is not Presence.GONE]
        for one in self._seen[member.name]:
            if (one.run, one.attempt) not in self._logged:
                self._logged.add((one.run, one.attempt))
                log.warning(
                    "attempt %d of %s runs on %s and the database does not know it: it is left alone; "
                    "stoker backup forget %s ends it",
                    one.attempt, one.run, member.name, one.run,
                )  # fmt: skip

    def running(self) -> dict[str, list[dict[str, Any]]]:
        """Running unknown tasks, by run."""
        found: dict[str, list[dict[str, Any]]] = {}
        for engine, seen in self._seen.items():
            for one in seen:
                task = {"attempt": one.attempt, "task": one.task, "engine": engine, "node": one.node}
                found.setdefault(one.run, []).append(task)
        return found

    async def end(self, runs: Collection[str]) -> None:
        """End tasks with SIGTERM, a grace, and SIGKILL. Their directories stay."""
        for engine, seen in self._seen.items():
            handles = {(one.run, one.attempt): one.handle for one in seen if one.run in runs}
            for (run, attempt), handle in handles.items():
                log.info("attempt %d of %s, which the database does not know, is ended", attempt, run)
                try:
                    await self._ctx.fleet.engine(engine).stop(handle, grace=_GRACE)
                except EngineError as exc:
                    log.warning("attempt %d of %s: %s", attempt, run, exc)
