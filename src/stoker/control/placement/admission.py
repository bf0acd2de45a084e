"""Who starts where: the queue's decisions become attempts, and attempts' places the queue's books."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stoker.control.placement import elastic
from stoker.control.state import LiveRun, LiveTask, numbers_of
from stoker.engine.base import Observation
from stoker.engine.port_allocator import PortAllocator
from stoker.frameworks.roles import has_world, ports
from stoker.scheduling import Grow, Place, Start
from stoker.spec.states import RunState
from stoker.store.rows import AddAttempt, AddEvent, AttemptRow, Change, EventRow, UpdateAttempt, UpdateRun

if TYPE_CHECKING:
    from stoker.control.loop import ControlLoop


class Admission:
    """Runs in the loop's thread."""

    def __init__(self, loop: ControlLoop) -> None:
        self._loop = loop
        self._ports = PortAllocator()

    def close(self) -> None:
        self._ports.close()

    def adopt(self, live: LiveRun, attempt: AttemptRow) -> None:
        """It was seated by an earlier server."""
        self.grow_later(live)
        self._ports.adopt(_ports(attempt))

    async def watch(self, again: asyncio.Event) -> None:
        """Decide whenever something may have changed."""
        while True:
            await again.wait()
            again.clear()
            starts = self._loop.scheduler.decide()
            if starts:
                await self._begin(starts)
            for one in self._loop.scheduler.adjust():
                live = self._loop.runs.get(one.id)
                if live is None or live.attempt is None:
                    continue  # it ended while another was told
                if isinstance(one, Grow):
                    await elastic.grow(self._loop, live, one)
                else:
                    await elastic.shrink(self._loop, live, one)

    def grow_later(self, live: LiveRun) -> None:
        """It may grow again, but not at once: each time costs it what it did since its last checkpoint."""
        if not live.job.workers.elastic:
            return
        self._loop.scheduler.may_grow(live.id, False)
        asyncio.get_running_loop().call_later(self._loop.settings.control.grow_after, self._may_grow, live.id)

    def _may_grow(self, run: str) -> None:
        if self._loop.scheduler.holds(run):
            self._loop.scheduler.may_grow(run, True)
            self._loop.schedule_soon()

    async def _begin(self, starts: Sequence[Start]) -> None:
        """Record the intent, all starts in one transaction; then let each run's step act on it."""
        now = time.time()
        changes: list[Change] = []
        begun: list[tuple[LiveRun, AttemptRow]] = []
        for start in starts:
            live = self._loop.runs[start.id]
            engine = self._loop.fleet.engine_of(start.places)
            placement = self.placement(live, engine, dict(enumerate(start.places)))
            number = live.row.attempt + 1
            attempt = AttemptRow(
                run=live.id, number=number, created_at=now, engine=engine, placement=placement
            )
            changes.append(AddAttempt(attempt))
            changes.append(UpdateRun(live.id, {"state": RunState.STARTING, "attempt": number, "reason": ""}))
            changes.append(AddEvent(EventRow(live.id, now, "starting", f"attempt {number} starts")))
            begun.append((live, attempt))
        await self._loop.committer.commit(changes)
        for live, attempt in begun:
            live.update(state=RunState.STARTING, attempt=attempt.number, reason="")
            live.begin(attempt)
            self.grow_later(live)
            self._loop.hub.publish(live.id)
            self._loop.kick(live)

    def placement(self, live: LiveRun, engine: str, places: Mapping[int, Place]) -> dict[str, Any]:
        """By task: where it goes, with what, and by which ports the others reach it. `places`: by number."""
        asks = list(self._loop.fleet.asks(live.job).items())
        shared = (
            has_world(live.job, live.parts)
            and not self._loop.fleet.engine(engine).surroundings(live.job).port
        )
        found: dict[str, Any] = {}
        for number, place in places.items():
            task, ask = asks[number]
            found[task] = {
                "node": place.node,
                "gpus": list(place.gpus),
                "cpu": ask.cpu,
                "memory": ask.memory,
                "isolation": self._loop.fleet.isolation(engine, place.node),
                "ordered": 0,
            }
            if not live.alone:
                found[task]["number"] = number
            if shared:
                found[task]["ports"] = list(self._ports.take(ports(live.job, task.rpartition("-")[0])))
        return found

    def new_ports(self, old: Sequence[int]) -> list[int]:
        """Others in place of these: somebody who does not ask us has one of them."""
        fresh = list(self._ports.take(len(old)))
        self._ports.give(old)
        return fresh

    def give_ports(self, attempt: AttemptRow) -> None:
        self._ports.give(_ports(attempt))

    def give_back_ports(self, ports: Sequence[int]) -> None:
        self._ports.give(ports)

    def placed(self, live: LiveRun, task: LiveTask, seen: Observation) -> None:
        """The engine put it where it saw fit: the queue's books follow."""
        assert live.attempt is not None
        node = self._loop.fleet.full(live.engine, seen.node)
        if not seen.node or task.place["node"] == node or task.name not in live.attempt.placement:
            return
        found = live.attempt.placement
        wanted = tuple(
            Place(node) if name == task.name else Place(place["node"], tuple(place["gpus"]))
            for name, place in found.items()
        )
        moved = self._loop.scheduler.move(live.id, wanted, numbers_of(live.attempt))
        if not moved:
            return
        placement = {
            name: {**before, "node": place.node, "gpus": list(place.gpus)}
            for (name, before), place in zip(found.items(), moved, strict=True)
        }
        live.attempt = replace(live.attempt, placement=placement)
        for name in placement.keys() & live.tasks.keys():
            live.tasks[name].place = dict(placement[name])
        change = UpdateAttempt(live.id, live.attempt.number, {"placement": placement})
        self._loop.spawn(self._loop.note([change]))


def _ports(attempt: AttemptRow) -> list[int]:
    return [port for place in attempt.placement.values() for port in place.get("ports") or ()]
