"""The step of one run: queue it, bring it up, take in what its tasks wrote, restart or end it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from stoker.control import run_secrets
from stoker.control.context import Context
from stoker.control.placement import elastic, places
from stoker.control.placement.node_health import NodeHealth
from stoker.control.policy import failure_policy, hold, outcome
from stoker.control.policy.task_phases import TaskPhase
from stoker.control.runs import debug_hold, hang
from stoker.control.runs.cleanup import Cleanup
from stoker.control.runs.folder import FolderKeeper
from stoker.control.runs.recorder import Recorder
from stoker.control.runs.shutdown import Shutdown
from stoker.control.runs.task_reader import TaskReader
from stoker.control.startup.attempt_launcher import AttemptLauncher
from stoker.control.startup.bringup import BringUp
from stoker.control.state import LiveRun, LiveTask
from stoker.frameworks.roles import is_anchor
from stoker.spec.roles import WORKER
from stoker.spec.run_transitions import ENDED, RunEvent
from stoker.spec.states import Cause, RunState
from stoker.store.rows import AddEvent, Change, EventRow, UpdateAttempt, UpdateRun

log = logging.getLogger(__name__)

_END_AGAIN = 60.0
"""Seconds until the engine is asked again to end launchers that are closing."""


class Reconciler:
    """Takes the steps of runs, one at a time per run. Runs in the loop's thread."""

    def __init__(self, ctx: Context, launcher: AttemptLauncher, health: NodeHealth, cleanup: Cleanup) -> None:
        self._ctx = ctx
        self._health = health
        self._cleanup = cleanup
        self._bring_up = BringUp(ctx, launcher)
        self._reader = TaskReader(ctx)
        self._shutdown = Shutdown(ctx)
        self._recorder = Recorder(ctx)
        self._folder = FolderKeeper(ctx)

    async def step(self, live: LiveRun) -> None:
        if live.state is RunState.QUEUED:
            await self._queued(live)
        elif live.state.holds:
            await self._holding(live)

    # -- in the queue ----------------------------------------------------------------------------------------

    async def _queued(self, live: LiveRun) -> None:
        if self._ctx.scheduler.holds(live.id):
            return  # its start is being recorded: the next step sees the desired state
        if live.row.desired != "run":
            self._ctx.scheduler.withdraw(live.id)
            event = RunEvent.SUSPENDED if live.row.desired == "suspend" else RunEvent.CANCELLED
            await self._leave_queue(live, live.after(event))
            return
        wait = live.due()
        if wait > 0:
            self._ctx.wakeups.kick_later(live, wait)
            return
        self._ctx.scheduler.enqueue(self._health.wary(self._ctx.fleet.request(live.row, live.job)))
        self._ctx.wakeups.schedule_soon()

    async def _leave_queue(self, live: LiveRun, state: RunState) -> None:
        now = time.time()
        reason = str(state)
        values: dict[str, Any] = {"state": state, "reason": reason}
        if state.terminal:
            values |= {"ended_at": now, "cause": Cause.STOPPED}
        text = f"{reason} while it waited in the queue"
        await self._ctx.committer.commit(
            [UpdateRun(live.id, values), AddEvent(EventRow(live.id, now, "ended", text))]
        )
        live.update(**values)
        self._retire(live)

    # -- holding a place -------------------------------------------------------------------------------------

    async def _holding(self, live: LiveRun) -> None:
        elastic.give_back(self._ctx, live)
        if (live.row.desired != "run" or live.preempt) and live.closing is None:
            live.closing = outcome.stopped(None, live.row.desired, {"message": "it had not started yet"})
        never = await self._bring_up.bring(live)
        if never is not None:
            started = [task for task in live.tasks.values() if task.ordered and task.ingester is not None]
            if all(task.over and not task.carrying for task in started):
                await self._bring_up.let_go(live)
                await self._finish(live, never, [])
                return
            live.closing = live.closing or never  # running tasks are stopped and read to their end
        if live.closing is not None:
            await self._shutdown.stop(live, list(live.tasks.values()))
        found = await self._reader.look(live)
        changes = await self._recorder.take_in(live, found)
        changes += hang.note(live, found)
        await elastic.regroup(self._ctx, live)
        decision = failure_policy.decide(
            [
                _task_state(task, self._on_loss(live, task))
                for task in live.tasks.values()
                if not task.joining
            ],
            closing=self._closing(live),
            reforming=live.reforming,
        )
        if decision.end is not None and not _carrying(live.tasks.values()):
            await self._finish(live, decision.end, changes)
            return
        await self._ctx.committer.commit(live.redaction.changes(changes))
        if changes or any(intake.visible for intake in found.values()):
            self._ctx.notifier.publish(live.id)
        await self._act(live, decision)

    def _closing(self, live: LiveRun) -> outcome.Outcome | None:
        """How the attempt ends. If it was stopped or preempted: by the verdicts of its tasks, if there are any."""
        if live.closing is None or live.closing.cause not in (Cause.STOPPED, Cause.PREEMPTED):
            return live.closing
        ends = [task.verdict for task in live.tasks.values() if task.part.ends and task.verdict is not None]
        cut_short = [verdict for verdict in ends if verdict.cause is not Cause.COMPLETED]
        return cut_short[0] if cut_short else ends[0] if ends else live.closing

    async def _act(self, live: LiveRun, decision: failure_policy.Decision) -> None:
        if decision.close is not None:
            live.closing = decision.close
        if decision.trouble is not None and live.reforming is None:
            live.reforming = decision.trouble
        if decision.stop:
            brief = live.closing is None and not live.regroup
            await self._shutdown.stop(live, [live.tasks[name] for name in decision.stop], brief=brief)
        if decision.reform is not None:
            await self._reform(live, decision.reform)
        elif decision.again:
            await self._restart_tasks(live, [live.tasks[name] for name in decision.again])

    # -- restarts --------------------------------------------------------------------------------------------

    async def _reform(self, live: LiveRun, verdict: outcome.Outcome) -> None:
        """All members have ended: the world starts again on the launchers that are left, or the attempt is over."""
        world = [task for task in live.tasks.values() if self._on_loss(live, task) == "world"]
        if _carrying(world):
            return  # the next generation starts from these checkpoints, and the count of failures depends on them
        following = self._following(live, verdict)
        if live.regroup and verdict is live.reforming and live.row.desired == "run":
            following = outcome.Next(
                RunState.QUEUED, live.row.failures, live.row.faults, reason=verdict.reason
            )
        survivors = [
            task for task in live.tasks.values() if task.gone is None and not task.phase.launcher_over
        ]
        if live.alone or not survivors or following.state is not RunState.QUEUED:
            await self._close(live, verdict)
            return
        if self._end_closing(live, world):
            return
        live.reforming, live.regroup = None, False
        await self._restart(live, world, verdict, following)

    def _on_loss(self, live: LiveRun, task: LiveTask) -> str:
        """The role's `on_loss`. "task" becomes "world" when tasks join or leave, and for an anchor that may get another
        address: the other tasks would not find it."""
        own = task.part.on_loss
        if own == "task" and live.regroup:
            return "world"
        if own != "task" or not is_anchor(live.job, task.part.role):
            return own
        lost = [other for other in live.tasks.values() if other.over and other.phase.launcher_over]
        moves = any(is_anchor(live.job, other.part.role) for other in lost)
        by_place = moves and self._ctx.fleet.engine(live.engine).surroundings(live.job).port > 0
        return "world" if by_place else own

    async def _restart_tasks(self, live: LiveRun, tasks: Sequence[LiveTask]) -> None:
        """Restart only these tasks; the others go on."""
        if _carrying(tasks):
            return
        verdict = failure_policy.root([_task_state(task, "task") for task in tasks], alone=False)
        following = self._following(live, verdict)
        if following.state is not RunState.QUEUED:
            await self._close(live, verdict)
            return
        if not self._end_closing(live, tasks):
            await self._restart(live, tasks, verdict, following)

    def _end_closing(self, live: LiveRun, tasks: Sequence[LiveTask]) -> bool:
        """Whether one of these launchers is closing. The platform told it to end (its pod is being deleted), so it starts
        no other body. The engine is asked to end it at once; the caller waits, then replaces it."""
        now = time.monotonic()
        closing = [task for task in tasks if task.phase is TaskPhase.CLOSING]
        due = [task for task in closing if task.hastened is None or now - task.hastened > _END_AGAIN]
        if due:
            for task in due:
                task.hastened = now
            names = [task.name for task in due]
            engine = self._ctx.fleet.engine(live.engine)
            self._ctx.wakeups.spawn(engine.stop(live.handle, grace=timedelta(0), tasks=names))
        if closing:
            self._ctx.wakeups.observe_soon()
            self._ctx.wakeups.kick_later(live, 1.0)
        return bool(closing)

    async def _close(self, live: LiveRun, verdict: outcome.Outcome) -> None:
        """Stop the tasks that run. The attempt finishes once all have ended."""
        live.closing = verdict
        live.reforming = None
        if all(task.over and not task.carrying for task in live.tasks.values()):
            await self._finish(live, verdict, [])
        else:
            await self._shutdown.stop(live, [task for task in live.tasks.values() if not task.over])

    def _following(self, live: LiveRun, verdict: outcome.Outcome) -> outcome.Next:
        control = self._ctx.settings.control
        return outcome.decide(
            verdict,
            desired=live.row.desired,
            retries=live.job.retries,
            failures=live.row.failures,
            faults=live.row.faults,
            progressed=live.progressed,
            fruitless=live.fruitless,
            backoff=control.retry_backoff,
            backoff_max=control.retry_backoff_max,
            fault_retries=control.fault_retries,
        )

    async def _restart(
        self, live: LiveRun, tasks: Sequence[LiveTask], verdict: outcome.Outcome, following: outcome.Next
    ) -> None:
        """Record the next generation; the next step brings it up."""
        assert live.attempt is not None
        self._health.note(live, tasks)
        more: list[Change] = []
        folder = await self._folder.keep_between(live, tasks, more)
        generation = live.attempt.generation + 1
        placement = dict(live.attempt.placement)
        given_up = any(task.given_up for task in tasks)
        left = [task for task in tasks if task.leaving or self._no_room(live, task, tasks)]
        for task in left:
            del placement[task.name]
        tasks = [task for task in tasks if task not in left and (not task.joining or task.up)]
        for task in tasks:
            lost = task.gone is not None
            place = replace(
                task.place,
                generation=generation,
                incarnation=task.incarnation + lost,
                given_up=task.given_up if lost else task.place.given_up,
                moved=task.place.moved + given_up,
                joining=False,
            )
            if verdict.cause is Cause.ENGINE_ERROR and place.ports:
                place = replace(place, ports=places.new_ports(self._ctx, place.ports))
            placement[task.name] = place
        counters: dict[str, Any] = {
            "failures": following.failures,
            "faults": following.faults,
            "reason": following.reason,
        }
        if folder is not None:
            counters["folder"] = folder
        lost_names = ", ".join(task.name for task in tasks if task.gone is not None)
        event = {"cause": verdict.cause, "generation": generation, "evidence": dict(verdict.evidence)}
        text = (
            f"{verdict.reason}; "
            + (f"{lost_names} is replaced, " if lost_names else "")
            + f"generation {generation} follows"
        )
        # In memory first: a change of a place while this is recorded builds on it, and is recorded after it.
        live.attempt = replace(live.attempt, generation=generation, placement=placement)
        live.update(**counters)
        for task in tasks:
            if task.gone is not None:
                live.submitted = False
            task.again(generation, placement[task.name])
        live.tried(verdict.cause.users_fault)
        live.waits_since = live.first_up = None
        live.form_at = time.monotonic() + following.delay
        live.dirty = True
        await self._ctx.committer.commit(
            [
                UpdateAttempt(
                    live.id, live.attempt.number, {"generation": generation, "placement": placement}
                ),
                UpdateRun(live.id, counters),
                *live.redaction.changes(more),
                AddEvent(EventRow(live.id, time.time(), "reforming", text, event)),
            ]
        )
        if left:
            elastic.forget(self._ctx, live, left)
        places.grow_later(self._ctx, live)
        self._ctx.notifier.publish(live.id)

    def _no_room(self, live: LiveRun, task: LiveTask, tasks: Sequence[LiveTask]) -> bool:
        """Whether a lost worker of an elastic run is dropped: its node is gone, and enough other workers are left."""
        if task.gone is None or not live.job.workers.elastic or task.part.role != WORKER:
            return False
        node = self._ctx.fleet.node(live.engine, task.place.node or "")
        if node is not None and node.ready:
            return False
        workers = [one for one in tasks if one.part.role == WORKER and not one.leaving and one.gone is None]
        return len(workers) >= live.job.workers.min

    # -- the end ---------------------------------------------------------------------------------------------

    async def _finish(self, live: LiveRun, verdict: outcome.Outcome, changes: list[Change]) -> None:
        assert live.attempt is not None
        self._health.note(live, live.tasks.values())
        folder = await self._folder.keep(live, changes)
        following = self._following(live, verdict)
        now = time.time()
        values: dict[str, Any] = {
            "state": live.after(ENDED[following.state]),
            "failures": following.failures,
            "faults": following.faults,
            "reason": following.reason,
            "exit_code": verdict.exit_code,
            "cause": verdict.cause,
            "not_before": now + following.delay if following.delay else 0.0,
        }
        outputs = await self._recorder.outputs(live, changes)
        if outputs is not None:
            values["outputs"] = outputs
        if folder is not None:
            values["folder"] = folder
        if following.state.terminal:
            values["ended_at"] = now
        ended: dict[str, Any] = {
            "state": "ended",
            "cause": verdict.cause,
            "evidence": dict(verdict.evidence),
            "exit_code": verdict.exit_code,
            "ended_at": now,
            "usage": live.usage,
        }
        again = following.state is RunState.QUEUED
        if live.row.warnings:
            where = await asyncio.to_thread(self._recorder.refusals, live, changes, values, again=again)
            if where:
                ended["evidence"]["files"] = where
        kind = "requeued" if again else "ended"
        changes += self._recorder.last_rows(live)
        changes += [
            UpdateAttempt(live.id, live.attempt.number, ended),
            UpdateRun(live.id, values),
            AddEvent(EventRow(live.id, now, kind, following.reason, {"cause": verdict.cause})),
        ]
        kept = 0.0
        if live.launched and any(task.gone is None for task in live.tasks.values()):
            kept = hold.until(live.job, verdict, following, now)
        if kept:
            ended["evidence"]["kept_until"] = kept
            changes.append(AddEvent(EventRow(live.id, now, "kept", hold.say(live.id, live.job))))
        await self._ctx.committer.commit(live.redaction.changes(changes))
        live.update(**values)
        finished = replace(live.attempt, **ended)
        live.tried(verdict.cause.users_fault)
        live.leave()
        self._ctx.scheduler.release(live.id)
        self._retire(live)
        if kept:
            debug_hold.keep(self._ctx, live.row, live.job, finished, self._cleanup.begin)
        else:
            self._cleanup.begin(finished)
        self._ctx.wakeups.schedule_soon()

    def _retire(self, live: LiveRun) -> None:
        """After an attempt, or in the queue: drop the run from memory, or queue it again."""
        if live.state is RunState.QUEUED:
            live.dirty = True
        else:
            self._ctx.runs.pop(live.id, None)
            if live.state.terminal:
                run_secrets.forget(self._ctx.settings.home, live.row.key)
        self._ctx.notifier.publish(live.id)


def _carrying(tasks: Iterable[LiveTask]) -> bool:
    """Whether checkpoints of these tasks are still being transferred. Nothing follows before they have arrived."""
    return any(task.carrying for task in tasks)


def _task_state(task: LiveTask, on_loss: str) -> failure_policy.TaskState:
    return failure_policy.TaskState(
        task=task.name,
        on_loss=on_loss,
        ends=task.part.ends,
        may_fail=task.part.may_fail,
        verdict=task.verdict,
        told=task.excused,
        ended=task.ended,
        idle=not task.ordered,
    )
