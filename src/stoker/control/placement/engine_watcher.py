"""Watches one engine for the loop: the capacity of its nodes, the presence of its tasks, and changes of tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from stoker.control.context import Context
from stoker.control.fleet import FleetMember, Wait, sight
from stoker.control.placement import places
from stoker.control.placement.unknown_tasks import UnknownTasks
from stoker.control.state import LiveRun, LiveTask
from stoker.engine.base import Observation, Presence, Watches
from stoker.errors import EngineUnavailable
from stoker.store.rows import AddEvent, EventRow
from stoker.task import fencing

log = logging.getLogger(__name__)
Key = tuple[str, int, str]
"""Run, attempt, task."""

_UNLISTED = 3
"""Looks in a row without a task before it counts as gone: its directory may still be being made."""
_CAPACITY_EVERY = 5.0
_LOOK_EVERY = 10.0
"""Seconds between unprompted looks at a task when the engine reports changes."""
_CATCH_UP = 2.0
"""Seconds to fetch what a task wrote before it is given up."""
_AT_ONCE = 10
"""Runs that get an unprompted look together."""


class EngineWatcher:
    """Belongs to one session of the loop and one engine."""

    def __init__(
        self,
        ctx: Context,
        member: FleetMember,
        unknown: UnknownTasks,
        is_unknown: Callable[[Observation], bool],
    ) -> None:
        """`is_unknown`: whether the database does not know the attempt of a task without a live run."""
        self._ctx = ctx
        self._member = member
        self._unknown = unknown
        self._is_unknown = is_unknown
        self.known = asyncio.Event()
        """Set once the engine has reported its capacity."""
        self.observe = asyncio.Event()
        """Set to have its tasks observed now."""
        self._tasks: list[asyncio.Task[None]] = []
        self._told_to_end: set[tuple[str, int, str, int]] = set()
        """Incarnations that were silent on a ready node: each is told to end once."""
        self._giving_up: set[tuple[str, int, str, int]] = set()
        """Incarnations that are being given up."""
        self._ending: set[tuple[str, int, str, int]] = set()
        """Released incarnations that are being ended."""

    def begin(self, group: asyncio.TaskGroup) -> None:
        """Start watching the capacity, before the runs are loaded."""
        self._tasks.append(group.create_task(self._capacity()))

    def attend(self, group: asyncio.TaskGroup) -> None:
        """Start watching the tasks, after the runs are loaded."""
        for work in (self._presence(), self._changes(), self._look_again()):
            self._tasks.append(group.create_task(work))

    def leave(self) -> None:
        for task in self._tasks:
            task.cancel()

    # -- nodes -----------------------------------------------------------------------------------------------

    async def _capacity(self) -> None:
        member = self._member
        while True:
            try:
                nodes = await member.engine.capacity()
            except EngineUnavailable as exc:
                self._trouble(str(exc))
            else:
                if nodes != member.nodes or member.trouble is not None or not self.known.is_set():
                    member.nodes, member.trouble, member.known = nodes, None, True
                    self._ctx.wakeups.nodes_changed()
                self.known.set()
            await asyncio.sleep(_CAPACITY_EVERY)

    def _trouble(self, text: str) -> None:
        if self._member.trouble is None:
            log.warning("%s: cannot be reached: %s", self._member.name, text)
            self._member.trouble = text
            self._ctx.wakeups.nodes_changed()

    # -- tasks -----------------------------------------------------------------------------------------------

    async def _changes(self) -> None:
        engine = self._member.engine
        if not isinstance(engine, Watches):
            return
        async for run, attempt, task in engine.changes():
            live = self._ctx.runs.get(run)
            if live is not None and live.attempt is not None and live.attempt.number == attempt:
                self._ctx.wakeups.kick(live, task)
                if not live.launched:
                    self.observe.set()

    async def _presence(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                # Not `wait_for`: in Python 3.11 it drops a cancellation if the event is set at the same moment.
                async with asyncio.timeout(self._ctx.settings.control.poll):
                    await self.observe.wait()
            self.observe.clear()
            before = {
                (live.id, live.attempt.number, task.name)
                for live in self._ours()
                if live.submitted and live.attempt
                for task in (*live.tasks.values(), *live.left.values())
                if task.gone is None
            }
            try:
                seen = await self._member.engine.observe()
            except EngineUnavailable as exc:
                log.debug("%s: cannot observe: %s", self._member.name, exc)
                self._member.vigil.look(time.monotonic(), None)
                continue
            self._compare(before, seen)

    def _ours(self) -> list[LiveRun]:
        return [
            live
            for live in self._ctx.runs.values()
            if live.attempt is not None and live.attempt.engine == self._member.name
        ]

    def _compare(self, before: set[Key], seen: Sequence[Observation]) -> None:
        listed = set()
        unknown = []
        watched: dict[str, tuple[LiveRun, LiveTask, Observation]] = {}
        sights = []
        for observation in seen:
            listed.add((observation.run, observation.attempt, observation.task))
            live = self._ctx.runs.get(observation.run)
            if (
                live is None
                or live.attempt is None
                or (live.attempt.number, live.engine) != (observation.attempt, self._member.name)
            ):
                if self._is_unknown(observation):
                    unknown.append(observation)
                continue
            task = live.tasks.get(observation.task)
            if task is None:
                self._end_released(live, observation)
                task = live.outgoing(observation.task)
            if task is None or task.incarnation != observation.incarnation:
                continue  # the task has ended, or this is an older incarnation
            if task.name in live.tasks:
                self._take_in(live, task, observation)
            else:
                task.seen = observation
            found = sight(observation, live.job)
            watched[found.task] = live, task, observation
            sights.append(found)
        self._unknown.look(self._member, unknown)
        for name, verdict in self._member.vigil.look(time.monotonic(), sights).items():
            self._act(*watched[name], verdict)
        for key in before - listed:
            self._unlisted(*key)

    def _take_in(self, live: LiveRun, task: LiveTask, seen: Observation) -> None:
        before, task.seen = task.seen, seen
        task.missing = 0
        if task.ordered or not seen.waiting:
            task.wait = None
        else:
            known = task.wait
            task.wait = (known or Wait(seen.waiting, seen.hopeless)).follow(seen)
            if known is None or known.text != seen.waiting:
                text = seen.waiting if live.alone else f"{task.name}: {seen.waiting}"
                self._record_waiting(live, text)
            if task.wait.over:
                self._ctx.wakeups.kick(live)
        if before is None or before.node != seen.node:
            places.follow_engine(self._ctx, live, task, seen)
        if not task.ordered and seen.address and (before is None or before.address != seen.address):
            self._ctx.wakeups.kick(live)

    def _record_waiting(self, live: LiveRun, text: str) -> None:
        event = AddEvent(EventRow(live.id, time.time(), "waiting", text))
        self._ctx.wakeups.spawn(self._ctx.committer.commit([event]))
        self._ctx.notifier.publish(live.id)

    def _act(self, live: LiveRun, task: LiveTask, seen: Observation, verdict: str) -> None:
        if not live.submitted or task.gone is not None:
            return
        if seen.presence is Presence.GONE:
            task.lose(seen.proof or "its launcher is gone")
            self._ctx.wakeups.kick(live, task.name)
        elif verdict == fencing.REPLACE:
            self._ctx.wakeups.spawn(self._give_up(live, task, seen))
        elif (
            verdict == fencing.END
            and (one := (live.id, seen.attempt, task.name, seen.incarnation)) not in self._told_to_end
        ):
            self._told_to_end.add(one)
            log.warning(
                "%s of %s does not answer on node %s, which is ready: ended", task.name, live.id, seen.node
            )
            self._ctx.wakeups.spawn(
                self._member.engine.stop(live.handle, grace=timedelta(0), tasks=[task.name])
            )

    def _end_released(self, live: LiveRun, seen: Observation) -> None:
        """End a task that the run does not have any more, also a lost one that comes back."""
        one = (live.id, seen.attempt, seen.task, seen.incarnation)
        if seen.presence is Presence.ALIVE and one not in self._ending:
            self._ending.add(one)
            self._ctx.wakeups.spawn(self._end(one, seen))

    async def _end(self, one: tuple[str, int, str, int], seen: Observation) -> None:
        try:
            await self._member.engine.stop(seen.handle, grace=timedelta(0), tasks=[seen.task])
            self.observe.set()
        finally:
            self._ending.discard(one)

    async def _give_up(self, live: LiveRun, task: LiveTask, seen: Observation) -> None:
        """Fetch what the task wrote last, then count it as gone without proof, and stop calls to it."""
        one, directory = (live.id, seen.attempt, task.name, seen.incarnation), task.directory
        if one in self._giving_up:
            return
        self._giving_up.add(one)
        try:
            if directory is not None:
                await asyncio.to_thread(directory.catch_up, _CATCH_UP)
        finally:
            self._giving_up.discard(one)
        back = task.seen is not None and task.seen.presence is Presence.ALIVE
        if task.incarnation != seen.incarnation or task.gone is not None or back:
            return
        silence = f"no word from node {seen.node} for longer than lost_after ({live.job.lost_after:.0f} s)"
        task.lose(silence, given_up=True)
        if directory is not None:
            directory.abandon(silence)
        self._ctx.wakeups.kick(live, task.name)

    def _unlisted(self, run: str, number: int, name: str) -> None:
        live = self._ctx.runs.get(run)
        if live is None or live.attempt is None or live.attempt.number != number:
            return
        task = live.tasks.get(name) or live.outgoing(name)
        if task is None:
            return
        task.missing += 1
        if task.missing >= _UNLISTED and task.gone is None:
            task.lose("its task directory is gone")
            self._ctx.wakeups.kick(live, name)

    async def _look_again(self) -> None:
        """Kick every run now and then, in case a change was missed. A few at a time: all at once would delay answers of
        the loop."""
        watches = isinstance(self._member.engine, Watches)
        interval = _LOOK_EVERY if watches else self._ctx.settings.control.poll
        while True:
            holding = [live for live in self._ours() if live.state.holds]
            slices = [holding[at : at + _AT_ONCE] for at in range(0, len(holding), _AT_ONCE)] or [[]]
            for part in slices:
                await asyncio.sleep(interval / len(slices))
                for live in part:
                    if self._ctx.runs.get(live.id) is live and live.state.holds:
                        self._ctx.wakeups.kick(live)
