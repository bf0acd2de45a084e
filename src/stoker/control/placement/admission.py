"""Admission: turns the queue's decisions into attempts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from stoker.control.context import Context
from stoker.control.placement import elastic, places
from stoker.control.state import LiveRun
from stoker.scheduling import Grow, Start
from stoker.spec.run_transitions import RunEvent
from stoker.store.rows import AddAttempt, AddEvent, AttemptRow, Change, EventRow, UpdateRun


class Admission:
    """Runs in the loop's thread."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    def adopt(self, live: LiveRun, attempt: AttemptRow) -> None:
        """Take over the ports of an attempt that an earlier server started."""
        places.grow_later(self._ctx, live)
        self._ctx.ports.adopt(places.ports_of(attempt))

    async def watch(self, again: asyncio.Event) -> None:
        """Let the queue decide whenever `again` is set."""
        while True:
            await again.wait()
            again.clear()
            starts = self._ctx.scheduler.decide()
            if starts:
                await self._begin(starts)
            for one in self._ctx.scheduler.adjust():
                live = self._ctx.runs.get(one.id)
                if live is None or live.attempt is None:
                    continue  # it ended while another run was handled
                if isinstance(one, Grow):
                    await elastic.grow(self._ctx, live, one)
                else:
                    await elastic.shrink(self._ctx, live, one)

    async def _begin(self, starts: Sequence[Start]) -> None:
        """Record all starts in one transaction, then kick the runs."""
        now = time.time()
        changes: list[Change] = []
        begun: list[tuple[LiveRun, AttemptRow]] = []
        for start in starts:
            live = self._ctx.runs[start.id]
            engine = self._ctx.fleet.engine_of(start.places)
            placement = places.place_tasks(self._ctx, live, engine, dict(enumerate(start.places)))
            number = live.row.attempt + 1
            attempt = AttemptRow(
                run=live.id, number=number, created_at=now, engine=engine, placement=placement
            )
            changes.append(AddAttempt(attempt))
            state = live.after(RunEvent.ADMITTED)
            changes.append(UpdateRun(live.id, {"state": state, "attempt": number, "reason": ""}))
            changes.append(AddEvent(EventRow(live.id, now, "starting", f"attempt {number} starts")))
            begun.append((live, attempt))
        await self._ctx.committer.commit(changes)
        for live, attempt in begun:
            live.update(state=live.after(RunEvent.ADMITTED), attempt=attempt.number, reason="")
            live.begin(attempt)
            places.grow_later(self._ctx, live)
            self._ctx.notifier.publish(live.id)
            self._ctx.wakeups.kick(live)
