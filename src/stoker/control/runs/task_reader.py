"""Reads tasks: what is new in their directories, and how their bodies ended."""

from __future__ import annotations

import asyncio
import logging
import time

from stoker.control.context import Context
from stoker.control.ingest.journal_reader import OURS, Intake
from stoker.control.policy import outcome
from stoker.control.policy.task_phases import TaskEvent
from stoker.control.state import LiveRun, LiveTask
from stoker.engine.base import Presence
from stoker.spec.states import Cause
from stoker.task.directory import StillHeld, TaskDir, Unreachable
from stoker.task.formats import Ending, Status

log = logging.getLogger(__name__)

_JOURNAL_WAIT = 30.0
"""Seconds that a launcher has to journal an end that its status shows already."""
_STOPPED_WAIT = 5.0
"""The same after a stop: a user waits for it."""
_KILLED_WAIT = 2.0
"""The same after a kill."""
_KILLED_BACKLOG = 10.0
"""Seconds that files of a killed task are still read: user code can write faster than they are read."""
_LOOK_AGAIN = 5.0
"""Seconds until a failed look is retried."""
_PORT_IN_USE = ("Address already in use", "EADDRINUSE", "errno: 98")
"""What programs print when another process has their port."""


class TaskReader:
    """Runs in the loop's thread; reads in others."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    async def look(self, live: LiveRun) -> dict[str, Intake]:
        """Read what is new, by task. Sets the verdicts of tasks that have ended."""
        tasks = [
            task
            for task in live.tasks.values()
            if task.ingester is not None and task.ordered and _is_due(task)
        ]
        looks = [self._one(live, task) for task in tasks]
        found = [await looks[0]] if len(looks) == 1 else await asyncio.gather(*looks)
        return {task.name: intake for task, intake in zip(tasks, found, strict=True)}

    async def _one(self, live: LiveRun, task: LiveTask) -> Intake:
        """Read one task. A shortage on this machine, or a pod that does not answer, is retried. What was read before the
        error counts."""
        assert task.ingester is not None
        if task.over:
            return await asyncio.to_thread(task.ingester.collect)
        task.touched = False
        found = Intake(generation=task.generation)
        try:
            found = await asyncio.to_thread(task.ingester.look, final=task.gone is not None)
            await self._judge_end(live, task, found)
        except OSError as exc:
            if exc.errno not in OURS:
                raise
            log.warning("run %s: cannot look at %s: %s; trying again", live.id, task.name, exc)
            task.touched = True
            self._ctx.wakeups.kick_later(live, _LOOK_AGAIN)
        return found

    async def _judge_end(self, live: LiveRun, task: LiveTask, found: Intake) -> None:
        if not found.heard and self._waits_for_backlog(task, found):
            if found.more:  # read in pieces; otherwise arriving checkpoints wake the run
                task.touched = live.dirty = True
        elif found.ending is not None:
            self._end(
                live, task, self._judge(live, task, found.ending), found.ending.at, _event(found.ending)
            )
        elif task.gone is not None:
            self._end(live, task, await self._collect(live, task, found), time.time(), TaskEvent.COLLECTED)
        elif found.status is not None and found.status.phase == "ended":
            await self._end_by_status(live, task, found.status)
        elif not found.visible:
            self._ctx.wakeups.observe_soon()  # a wake-up without any change in its files: is the task still there?
        if task.over and task.ingester is not None:
            reader = task.ingester.reader
            found.changes += await asyncio.to_thread(reader.look_round, had_status=bool(task.reported))

    def _waits_for_backlog(self, task: LiveTask, found: Intake) -> bool:
        """Whether the task ends only when all it wrote is read. After a kill, the rest is left unread: a user waits."""
        if task.killed_at is None or time.monotonic() - task.killed_at < _KILLED_BACKLOG:
            return True
        if task.gone is None and not task.stopped:
            return True  # it has not ended yet
        assert task.ingester is not None
        task.ingester.reader.leave_unread(found)
        return False

    def _end(
        self, live: LiveRun, task: LiveTask, verdict: outcome.Outcome, at: float, event: TaskEvent
    ) -> None:
        task.judge(verdict, at, event)
        live.dirty = True

    def _judge(self, live: LiveRun, task: LiveTask, found: Ending) -> outcome.Outcome:
        """The launcher's ending; if the launcher was lost, what the engine reports."""
        if found.kind == "lost":
            proof = found.message or "its launcher was lost"
            lines = list(found.last_lines)
            return outcome.gone(proof, task.seen, desired=live.row.desired, last_lines=lines)
        verdict = outcome.judge(found, desired=live.row.desired)
        if verdict.cause is Cause.USER_ERROR and task.place.ports and _port_taken(found):
            text = "another process has one of its ports"
            return outcome.Outcome(Cause.ENGINE_ERROR, verdict.exit_code, text, verdict.evidence)
        return verdict

    async def _end_by_status(self, live: LiveRun, task: LiveTask, status: Status) -> None:
        """The status says that the body ended, and the new lines of the journal do not.

        The journal's last line was written after it was read, or an earlier server read it, or the disk is full. If
        user code destroyed the journal, the status counts."""
        assert task.ingester is not None
        reader = task.ingester.reader
        now = time.monotonic()
        if status.generation != task.generation:
            return  # of the previous body: the launcher has not seen the new order yet
        if task.unjournalled_since is None:
            before = await asyncio.to_thread(reader.read_before)
            if before is not None:
                self._end(live, task, self._judge(live, task, before), before.at, _event(before))
                return
        task.unjournalled_since = task.unjournalled_since or now
        wait = _JOURNAL_WAIT
        if task.stop_sent is not None:
            wait = _KILLED_WAIT if task.stop_sent == "kill" else _STOPPED_WAIT
        if not reader.spoiled and now - task.unjournalled_since < wait:
            task.touched = True
            self._ctx.wakeups.kick_later(live, 0.2)
            return
        event = TaskEvent.ENDED
        try:
            ending = Ending.from_json(status.ending or {})
            verdict, event = outcome.judge(ending, desired=live.row.desired), _event(ending)
        except TypeError:
            verdict = outcome.lost("its journal was destroyed", desired=live.row.desired, last_lines=[])
        self._end(live, task, verdict, time.time(), event)

    async def _collect(self, live: LiveRun, task: LiveTask, found: Intake) -> outcome.Outcome:
        """The launcher is gone and left no ending: settle its directory, and judge the task lost."""
        assert task.ingester is not None and live.attempt is not None and task.gone is not None
        directory = task.ingester.directory
        if directory.exists():
            try:
                await asyncio.to_thread(self._settle, live, task, directory)
            except OSError as exc:
                if exc.errno in OURS:
                    raise  # retried: complete checkpoints must not be lost to a full disk
                log.warning("run %s: what %s left cannot be collected: %s", live.id, task.name, exc)
            except StillHeld as exc:
                # The launcher is dead, so another process holds the lock: the directory is not settled.
                log.warning("run %s: what %s left cannot be collected: %s", live.id, task.name, exc)
            rest = await asyncio.to_thread(task.ingester.look, final=True)
            found.join(rest)
            if rest.ending is not None and rest.ending.kind != "lost":
                return outcome.judge(rest.ending, desired=live.row.desired)
        lines = await asyncio.to_thread(
            self._ctx.archive.last_lines, live.id, live.attempt.number, 20, task=task.name
        )
        return outcome.gone(task.gone, task.seen, desired=live.row.desired, last_lines=lines)

    def _settle(self, live: LiveRun, task: LiveTask, directory: TaskDir) -> None:
        """Journal what the dead launcher had complete. An unreachable directory counts as far as it has arrived."""
        if task.seen is not None and task.seen.presence is not Presence.GONE:
            return  # given up without proof: the launcher may still run
        try:
            directory.settle(task.generation)
        except Unreachable as exc:
            log.info("run %s: %s cannot be reached, what has arrived counts: %s", live.id, task.name, exc)


def _is_due(task: LiveTask) -> bool:
    assert task.ingester is not None
    if task.over:
        return task.ingester.has_arrived
    return task.touched or task.gone is not None


def _event(ending: Ending) -> TaskEvent:
    """CLOSED: its launcher ends too; ENDED: it waits for another order."""
    return TaskEvent.CLOSED if ending.final else TaskEvent.ENDED


def _port_taken(found: Ending) -> bool:
    return any(sign in line for line in [found.message, *found.last_lines] for sign in _PORT_IN_USE)
