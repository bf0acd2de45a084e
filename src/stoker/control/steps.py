"""What is done for one run when something may have changed: queue it, bring it up, take in what it left, end it."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from stoker.control import ending, keeping, orders, retention, secrets
from stoker.control.fleet import Member
from stoker.control.launch import Launcher
from stoker.control.live import TASK, LiveRun
from stoker.control.pump import OURS, Intake, Pump
from stoker.courier import carry_outputs
from stoker.engine.base import Observation, Presence, TaskDir
from stoker.errors import EngineError, EngineUnavailable, NotFound, StokerError, StoreError
from stoker.launcher.collect import collect
from stoker.spec.words import Cause, RunState
from stoker.store.rows import (
    AddEvent,
    AttemptRow,
    Change,
    EventRow,
    PutTask,
    TaskRow,
    UpdateAttempt,
    UpdateCheckpoint,
    UpdateRun,
)
from stoker.task.access import FarTaskDir
from stoker.task.formats import Ending, Status

if TYPE_CHECKING:
    from stoker.control.loop import Loop

log = logging.getLogger(__name__)

_STOP_MARGIN = 15.0
"""Seconds beyond the grace that a launcher has for its ladder, its last scan and its last lines."""
_CLEAN_AGAIN = 10.0
"""Seconds before an attempt that the engine still shows is cleaned up again: a pod on a lost node stays for long."""
_JOURNAL_WAIT = 30.0
"""Seconds that a launcher has to write to its journal what its status says already."""


class Steps:
    """The verbs of the loop. One step per run at a time; runs in the loop's thread."""

    def __init__(self, loop: Loop, launcher: Launcher) -> None:
        self._loop = loop
        self._launcher = launcher
        self._unknown: set[tuple[str, int]] = set()
        self._carriers = ThreadPoolExecutor(4, thread_name_prefix="outputs")
        """Apart from the threads that look at tasks: big outputs take their time."""

    async def step(self, live: LiveRun) -> None:
        if live.state is RunState.QUEUED:
            await self._queued(live)
        elif live.state.holds:
            await self._held(live)

    # -- waiting ---------------------------------------------------------------------------------------------

    async def _queued(self, live: LiveRun) -> None:
        if self._loop.scheduler.holds(live.id):
            return  # its start is being recorded: the step after that sees what is wanted of it by then
        if live.row.desired != "run":
            self._loop.scheduler.withdraw(live.id)
            state = RunState.SUSPENDED if live.row.desired == "suspend" else RunState.STOPPED
            await self._leave_queue(live, state)
            return
        wait = live.due()
        if wait > 0:
            self._loop.kick_later(live, wait)
            return
        self._loop.scheduler.enqueue(self._loop.fleet.request(live.row, live.job))
        self._loop.schedule_soon()

    async def _leave_queue(self, live: LiveRun, state: RunState) -> None:
        now = time.time()
        reason = str(state)
        values: dict[str, Any] = {"state": state, "reason": reason}
        if state.terminal:
            values |= {"ended_at": now, "cause": Cause.STOPPED}
        text = f"{reason} while it waited in the queue"
        await self._loop.committer.commit(
            [UpdateRun(live.id, values), AddEvent(EventRow(live.id, now, "ended", text))]
        )
        live.update(**values)
        self._retire(live)

    # -- holding a place -------------------------------------------------------------------------------------

    async def _held(self, live: LiveRun) -> None:
        if not live.launched and not await self._launch(live):
            return
        assert live.pump is not None
        if live.row.desired != "run" or live.preempt:
            await self._send_stop(live)
        found = await asyncio.to_thread(live.pump.look, final=live.gone is not None)
        verdict: ending.Verdict | None = None
        if found.more:
            live.dirty = True  # recorded piece by piece; nothing ends before all of it is
        elif found.ending is not None:
            verdict = self._judge(live, found.ending)
        elif live.gone is not None:
            verdict = await self._collect(live, found)
        elif found.status is not None and found.status.phase == "ended":
            verdict = self._unjournalled(live, found.status)
        changes = self._take_in(live, found)
        if verdict is not None:
            await self._finish(live, found, verdict, changes)
            return
        await self._loop.committer.commit(changes)
        if found.visible or changes:
            self._loop.hub.publish(live.id)

    async def _launch(self, live: LiveRun) -> bool:
        """Bring the attempt up, or find it where an earlier server left it. False: it is not up yet, or ended before
        it began."""
        assert live.attempt is not None
        try:
            engine = self._loop.fleet.engine(live.engine)
            if not live.submitted:
                bare = self._loop.fleet.bare(live.engine, live.places[0].node)
                handle = await self._launcher.submit(live, engine, bare)
                live.attempt = replace(live.attempt, handle=dict(handle))
                live.submitted = True
            launched = await self._launcher.launch(live, engine, live.handle)
        except (EngineUnavailable, StoreError):
            raise
        except (StokerError, OSError) as exc:
            if isinstance(exc, OSError) and live.engine != self._loop.fleet.home:
                # The way to a far task broke off. What was brought stays there; the rest is brought when it answers.
                log.info("run %s: its task does not answer: %s; trying again", live.id, exc)
                await self._not_up(live)
            else:
                await self._failed_to_launch(live, exc)
            return False
        if launched is None:
            await self._not_up(live)
            return False
        cursors = await asyncio.to_thread(self._loop.store.cursors, live.id, live.attempt.number)
        latest = (
            await asyncio.to_thread(self._loop.store.latest_metrics, live.id) if live.row.attempt > 1 else {}
        )
        live.pump = Pump(
            self._loop.settings.home,
            self._loop.blobs,
            launched.directory,
            run=live.id,
            attempt=live.attempt.number,
            task=TASK,
            generation=live.attempt.generation,
            cursors=cursors,
            latest=latest,
            logs=self._loop.settings.logs,
        )
        values: dict[str, Any] = {"handle": dict(launched.handle), "order_seq": 1}
        if launched.resumed_from is not None:
            values["resumed_from"] = launched.resumed_from.id
        live.attempt = replace(live.attempt, **values)
        live.launched = True
        live.wait = None
        # Not awaited for its own sake: names are deterministic, so a crash before this is recorded loses nothing.
        await self._loop.committer.commit(
            [*launched.changes, UpdateAttempt(live.id, live.attempt.number, values)]
        )
        return True

    async def _not_up(self, live: LiveRun) -> None:
        """Its tasks are asked for and not there yet: a pod that waits for its place or its image. That may end before
        it begins."""
        verdict: ending.Verdict | None = None
        if live.gone is not None:
            verdict = ending.gone(live.gone, live.seen, desired=live.row.desired, last_lines=[])
        elif live.row.desired != "run" or live.preempt:
            evidence = {"message": "it had not started yet"}
            verdict = ending.stopped(None, live.row.desired, evidence)
        elif live.wait is not None and live.wait.over:
            verdict = ending.hopeless(live.wait.cause, live.wait.text, live.wait.patience, live.seen)
        if verdict is None:
            self._loop.kick_later(live, 1.0)
            return
        if live.gone is None:
            engine = self._loop.fleet.engine(live.engine)
            await engine.stop(live.handle, grace=timedelta(0))
        await self._finish(live, Intake(), verdict, [])

    def _judge(self, live: LiveRun, found: Ending) -> ending.Verdict:
        """The launcher's word; where it could not know better, the engine's."""
        if found.kind == "lost":
            proof = found.message or "its launcher was lost"
            lines = list(found.last_lines)
            return ending.gone(proof, live.seen, desired=live.row.desired, last_lines=lines)
        return ending.judge(found, desired=live.row.desired)

    async def _failed_to_launch(self, live: LiveRun, exc: Exception) -> None:
        log.warning("run %s: attempt could not be brought up: %s", live.id, exc)
        cause = Cause.ENGINE_ERROR
        reason = getattr(exc, "message", None) or str(exc)
        verdict = ending.Verdict(cause, None, f"could not be started: {reason}", {"message": reason})
        await self._finish(live, Intake(), verdict, [])

    async def _send_stop(self, live: LiveRun) -> None:
        """Tell the launcher, once per kind of stop; a launcher that does not answer in time is ended."""
        assert live.pump is not None and live.attempt is not None
        kind = "kill" if live.row.desired == "kill" else "stop"
        if live.stop_sent in (kind, "kill"):
            return
        directory = live.pump.directory
        current = directory.order()
        seq = current.seq if current else 0
        if current is None or current.verb != "stop" or (kind == "kill" and not current.kill):
            order = orders.stop_order(
                live.job, seq=seq + 1, generation=live.attempt.generation, kill=kind == "kill"
            )
            try:
                await asyncio.to_thread(directory.write_order, order)
            except OSError as exc:
                # The directory is gone, then presence will say so; or something is in the way (a full disk, a
                # link), then the engine ends the task when its time is over.
                log.warning("run %s: cannot be told to stop: %s", live.id, exc)
                self._loop.observe_soon()
        live.stop_sent = kind
        grace = 0.0 if kind == "kill" else live.job.grace
        live.stop_deadline = time.monotonic() + grace + _STOP_MARGIN
        if live.state is not RunState.STOPPING:
            text = (
                {"stop": "asked to stop", "kill": "killed"}[kind]
                if live.row.desired != "run"
                else "preempted"
            )
            await self._loop.committer.commit(
                [
                    UpdateRun(live.id, {"state": RunState.STOPPING}),
                    UpdateAttempt(live.id, live.attempt.number, {"state": "stopping"}),
                    AddEvent(EventRow(live.id, time.time(), "stopping", f"{text}; {grace:.0f} s of grace")),
                ]
            )
            live.update(state=RunState.STOPPING)
            self._loop.hub.publish(live.id)

    def _unjournalled(self, live: LiveRun, status: Status) -> ending.Verdict | None:
        """The status says that the body ended and the journal does not. Its last line was written after we read
        it, or there is no room for it yet; or user code destroyed it, then the status has to do."""
        now = time.monotonic()
        live.unjournalled_since = live.unjournalled_since or now
        if now - live.unjournalled_since < _JOURNAL_WAIT:
            self._loop.kick_later(live, 0.2)
            return None
        try:
            return ending.judge(Ending.from_json(status.ending or {}), desired=live.row.desired)
        except TypeError:
            return ending.lost("its journal was destroyed", desired=live.row.desired, last_lines=[])

    async def _collect(self, live: LiveRun, found: Intake) -> ending.Verdict:
        """The launcher is proven dead and left no ending: see what was complete, and call it lost."""
        assert live.pump is not None and live.attempt is not None and live.gone is not None
        directory = live.pump.directory
        if directory.exists():
            try:
                await asyncio.to_thread(self._settle, live, directory)
            except OSError as exc:
                if exc.errno in OURS:
                    raise  # tried again: what was complete must not be lost to a full disk
                log.warning("run %s: what it left cannot be collected: %s", live.id, exc)
            rest = await asyncio.to_thread(live.pump.look, final=True)
            found.changes += rest.changes
            found.checkpoints += rest.checkpoints
            found.started_at = found.started_at or rest.started_at
            found.status = rest.status or found.status
            if rest.ending is not None and rest.ending.kind != "lost":
                return ending.judge(rest.ending, desired=live.row.desired)
        lines = await asyncio.to_thread(self._loop.archive.last_lines, live.id, live.attempt.number, 20)
        return ending.gone(live.gone, live.seen, desired=live.row.desired, last_lines=lines)

    def _settle(self, live: LiveRun, directory: TaskDir) -> None:
        """Have it journalled what the dead launcher had complete. What cannot be reached any more is lost."""
        assert live.attempt is not None
        if isinstance(directory, FarTaskDir):
            if live.seen is None or live.seen.presence is Presence.GONE:
                try:
                    directory.settle(live.attempt.generation)
                except OSError as exc:
                    log.info("run %s: its task is out of reach, what has arrived counts: %s", live.id, exc)
        else:
            collect(directory.root, live.attempt.generation)

    def _take_in(self, live: LiveRun, found: Intake) -> list[Change]:
        """What a look means for the rows."""
        assert live.attempt is not None
        changes = list(found.changes)
        if found.checkpoints:
            live.progressed = True
            changes += self._retain(live, found)
        if found.started_at is not None and live.state is RunState.STARTING:
            first = live.row.started_at or found.started_at
            changes += [
                UpdateRun(live.id, {"state": RunState.RUNNING, "started_at": first}),
                UpdateAttempt(
                    live.id, live.attempt.number, {"state": "running", "started_at": found.started_at}
                ),
                AddEvent(
                    EventRow(live.id, found.started_at, "running", f"attempt {live.attempt.number} runs")
                ),
            ]
            live.update(state=RunState.RUNNING, started_at=first)
            live.attempt = replace(live.attempt, state="running", started_at=found.started_at)
            order = live.pump.directory.order() if live.pump is not None and live.job.setup else None
            record = (
                self._loop.packages.record(
                    live.row, order.setup["directory"] if order and order.setup else None
                )
                if live.engine == self._loop.fleet.home
                else None
            )
            if record is not None:
                changes.append(UpdateRun(live.id, {"record": record}))
                live.update(record=record)
        status = found.status
        if status is not None and (status.phase != live.phase or status.usage != live.usage):
            live.phase, live.usage = status.phase, dict(status.usage)
            changes.append(PutTask(self._task_row(live, None)))
        if found.ending is not None and found.ending.usage:
            live.usage = dict(found.ending.usage)
        return changes

    def _retain(self, live: LiveRun, found: Intake) -> list[Change]:
        rows = self._loop.store.checkpoints(live.id, kept_only=True)
        # What this look adds is not in the store yet: it is newer than all that is.
        newest = max((row.seq for row in rows), default=0)
        fresh = [replace(row, seq=newest + 1 + index) for index, row in enumerate(found.checkpoints)]
        known = {row.id for row in fresh}
        best = live.job.checkpoint.best
        dropped = retention.to_drop(
            [row for row in rows if row.id not in known] + fresh,
            keep=live.job.checkpoint.keep,
            metric=best.metric if best else None,
            mode=best.mode if best else "max",
        )
        self._loop.sweeper.dropped.update(row.digest for row in dropped)
        return [UpdateCheckpoint(row.id, {"kept": False}) for row in dropped]

    # -- the end ---------------------------------------------------------------------------------------------

    async def _finish(
        self, live: LiveRun, found: Intake, verdict: ending.Verdict, changes: list[Change]
    ) -> None:
        assert live.attempt is not None
        control = self._loop.settings.control
        following = ending.decide(
            verdict,
            desired=live.row.desired,
            retries=live.job.retries,
            failures=live.row.failures,
            faults=live.row.faults,
            progressed=live.progressed,
            backoff=control.retry_backoff,
            backoff_max=control.retry_backoff_max,
            fault_retries=control.fault_retries,
        )
        now = time.time()
        values: dict[str, Any] = {
            "state": following.state,
            "failures": following.failures,
            "faults": following.faults,
            "reason": following.reason,
            "exit_code": verdict.exit_code,
            "cause": verdict.cause,
            "not_before": now + following.delay if following.delay else 0.0,
        }
        outputs = await self._outputs(live, changes)
        if outputs is not None:
            values["outputs"] = outputs
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
        kind = "ended" if following.state is not RunState.QUEUED else "requeued"
        changes += [
            PutTask(self._task_row(live, verdict.exit_code)),
            UpdateAttempt(live.id, live.attempt.number, ended),
            UpdateRun(live.id, values),
            AddEvent(EventRow(live.id, now, kind, following.reason, {"cause": verdict.cause})),
        ]
        kept = (
            keeping.until(live.job, verdict, following, now) if live.launched and live.gone is None else 0.0
        )
        if kept:
            ended["evidence"]["kept_until"] = kept
            changes.append(AddEvent(EventRow(live.id, now, "kept", keeping.say(live.id, live.job))))
        await self._loop.committer.commit(changes)
        live.update(**values)
        finished = replace(live.attempt, **ended)
        live.attempt, live.pump = None, None
        self._loop.scheduler.release(live.id)
        self._retire(live)
        if kept:
            keeping.keep(self._loop, live.row, live.job, finished)
        else:
            self._loop.clean(finished)
        self._loop.schedule_soon()

    async def _outputs(self, live: LiveRun, changes: list[Change]) -> dict[str, Any] | None:
        if live.pump is None:
            return None
        known = live.row.outputs["digest"] if live.row.outputs else None
        carry = partial(carry_outputs, live.pump.directory, self._loop.blobs, known=known)
        try:
            digest, files, size = await asyncio.get_running_loop().run_in_executor(self._carriers, carry)
        except (StokerError, OSError) as exc:
            text = f"outputs could not be kept: {exc}"
            changes.append(AddEvent(EventRow(live.id, time.time(), "warning", text)))
            return None
        return {"digest": digest, "files": files, "bytes": size} if files else None

    def _retire(self, live: LiveRun) -> None:
        """After the end of an attempt, or of the waiting: out of memory, or back into the queue."""
        if live.state is RunState.QUEUED:
            live.dirty = True
        else:
            self._loop.runs.pop(live.id, None)
            if live.state.terminal:
                secrets.forget(self._loop.settings.home, live.row.key)
        self._loop.hub.publish(live.id)

    def _task_row(self, live: LiveRun, exit_code: int | None) -> TaskRow:
        assert live.attempt is not None
        phase = "ended" if exit_code is not None else live.phase or "starting"
        return TaskRow(live.id, live.attempt.number, TASK, phase=phase, exit_code=exit_code, usage=live.usage)

    # -- what is left ----------------------------------------------------------------------------------------

    async def clean(self, attempt: AttemptRow) -> None:
        """Release the launcher and delete what the engine holds; everything worth keeping has been carried."""
        handle = attempt.handle or {"run": attempt.run, "attempt": attempt.number}
        try:
            engine = self._loop.fleet.engine(attempt.engine)
            directory = await engine.reach(handle, TASK)
            if directory.exists():
                await asyncio.to_thread(self._release, directory)
            await engine.stop(handle, grace=timedelta(seconds=2))
            await engine.remove(handle)
            await self._loop.committer.commit([UpdateAttempt(attempt.run, attempt.number, {"removed": True})])
            self._loop.scheduler.release(keeping.name(attempt))
            self._loop.schedule_soon()
        except (EngineError, OSError) as exc:
            log.warning("attempt %s of %s is not cleaned up yet: %s", attempt.number, attempt.run, exc)
        finally:
            asyncio.get_running_loop().call_later(
                _CLEAN_AGAIN, self._loop.cleaning.discard, (attempt.run, attempt.number)
            )

    def _release(self, directory: TaskDir) -> None:
        """Let the launcher go by itself. Where user code is in the way the engine ends it."""
        try:
            order = directory.order()
            directory.forget_secrets()
            if order is not None and order.verb != "release":
                directory.write_order(orders.release_order(seq=order.seq + 1, generation=order.generation))
        except OSError as exc:
            log.info("%s: cannot be released: %s", directory.root, exc)

    def orphan(self, member: Member, observation: Observation) -> None:
        """A task that belongs to no live attempt: one that has ended, or one this database never knew."""
        key = (observation.run, observation.attempt)
        if key in self._loop.cleaning or key in self._unknown:
            return
        try:
            attempt = self._loop.store.attempt(*key)
        except NotFound:
            # Its row is lost (a restored backup): end it, but keep its directory, which is all there is of it.
            self._unknown.add(key)
            log.warning("attempt %s of %s is unknown here: ended, its directory is kept", key[1], key[0])
            self._loop.spawn(member.engine.stop(observation.handle, grace=timedelta(seconds=10)))
            return
        if attempt.state == "ended" and not keeping.is_kept(attempt):
            self._loop.clean(attempt)
