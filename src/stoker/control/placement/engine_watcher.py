"""Watching one engine for the loop: what its nodes can take, which of its tasks are there, what may have changed."""

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
"""Looks in a row that must not list an attempt before it counts as gone: a directory being made is not there yet."""
_CAPACITY_EVERY = 5.0
_SAFETY_NET = 10.0
"""Seconds between unprompted looks at a running task when the engine watches by itself."""
_LAST_WORDS = 2.0
"""Seconds that a task which is given up has for what it still has to say."""
_AT_ONCE = 10
"""How many tasks are looked at together, unprompted."""


class EngineWatcher:
    """Belongs to one session of the loop and one engine."""

    def __init__(
        self,
        ctx: Context,
        member: FleetMember,
        unknown: UnknownTasks,
        is_unknown: Callable[[Observation], bool],
    ) -> None:
        """`is_unknown`: whether the database does not know the attempt of a task that no live run has."""
        self._ctx = ctx
        self._member = member
        self._unknown = unknown
        self._is_unknown = is_unknown
        self.known = asyncio.Event()
        """Set once its capacity was heard."""
        self.observe = asyncio.Event()
        """Set to have its tasks looked at now."""
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: set[tuple[str, int, str, int]] = set()
        """Silent on a ready node: each incarnation of a task is told to end once."""
        self._parting: set[tuple[str, int, str, int]] = set()
        """Being given up."""
        self._ending: set[tuple[str, int, str, int]] = set()
        """Being ended, after it was let go."""

    def begin(self, group: asyncio.TaskGroup) -> None:
        """Before the runs are loaded: what there is to run on."""
        self._tasks.append(group.create_task(self._capacity()))

    def attend(self, group: asyncio.TaskGroup) -> None:
        """After that: everything else."""
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
                # Not `wait_for`: Python 3.11's forgets that it was cancelled when the event is set at that moment.
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
        strangers = []
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
                    strangers.append(observation)
                continue
            task = live.tasks.get(observation.task)
            if task is None:
                self._let_go(live, observation)
                task = live.outgoing(observation.task)
            if task is None or task.incarnation != observation.incarnation:
                continue  # it has ended, or is what is left of one that was replaced
            if task.name in live.tasks:
                self._take_in(live, task, observation)
            else:
                task.seen = observation
            found = sight(observation, live.job)
            watched[found.task] = live, task, observation
            sights.append(found)
        self._unknown.look(self._member, strangers)
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
                self._say_waiting(live, text)
            if task.wait.over:
                self._ctx.wakeups.kick(live)
        if before is None or before.node != seen.node:
            places.follow_engine(self._ctx, live, task, seen)
        if not task.ordered and seen.address and (before is None or before.address != seen.address):
            self._ctx.wakeups.kick(live)

    def _say_waiting(self, live: LiveRun, text: str) -> None:
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
            and (one := (live.id, seen.attempt, task.name, seen.incarnation)) not in self._ended
        ):
            self._ended.add(one)
            log.warning(
                "%s of %s does not answer on node %s, which is ready: ended", task.name, live.id, seen.node
            )
            self._ctx.wakeups.spawn(
                self._member.engine.stop(live.handle, grace=timedelta(0), tasks=[task.name])
            )

    def _let_go(self, live: LiveRun, seen: Observation) -> None:
        """It is not the run's any more, whoever decided that and when. While it is there it is told to end, also one
        that was lost and comes back."""
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
        """What it said last is asked for once more. Then nobody waits for it any more, nor for an answer of its."""
        one, directory = (live.id, seen.attempt, task.name, seen.incarnation), task.directory
        if one in self._parting:
            return
        self._parting.add(one)
        try:
            if directory is not None:
                await asyncio.to_thread(directory.catch_up, _LAST_WORDS)
        finally:
            self._parting.discard(one)
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
        """A change that nobody noticed: every task is looked at now and then, a few at a time. All at once would
        hold up everybody who waits for an answer."""
        watches = isinstance(self._member.engine, Watches)
        interval = _SAFETY_NET if watches else self._ctx.settings.control.poll
        while True:
            holding = [live for live in self._ours() if live.state.holds]
            slices = [holding[at : at + _AT_ONCE] for at in range(0, len(holding), _AT_ONCE)] or [[]]
            for part in slices:
                await asyncio.sleep(interval / len(slices))
                for live in part:
                    if self._ctx.runs.get(live.id) is live and live.state.holds:
                        self._ctx.wakeups.kick(live)
