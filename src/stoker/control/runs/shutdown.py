"""Tells tasks to stop."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Sequence
from datetime import timedelta

from stoker.control.context import Context
from stoker.control.policy.task_phases import TaskEvent
from stoker.control.startup import orders
from stoker.control.state import LiveRun, LiveTask
from stoker.spec.run_transitions import RunEvent
from stoker.spec.states import Cause, RunState
from stoker.store.rows import AddEvent, Change, EventRow, UpdateAttempt, UpdateRun
from stoker.task.local_directory import UnsafePath

log = logging.getLogger(__name__)

_STOP_MARGIN = 15.0
"""Seconds beyond the grace that a launcher has for its signals, its last scan and its last lines."""
_KILL_MARGIN = 5.0
"""The same for a launcher that kills its processes at once."""
_TELL_WAIT = 2.0
"""Seconds to wait for the orders to be written. A task that does not answer must not delay the step."""
_BLOCKED = (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ELOOP)
"""The run replaced the file by something else. Retries do not help, unlike with a task that cannot be reached."""
_BRIEF_GRACE = 10.0
"""Seconds of grace, at most, for tasks of a broken world: they wait for members that have ended."""


class Shutdown:
    """Runs in the loop's thread."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    async def stop(self, live: LiveRun, tasks: Sequence[LiveTask], *, brief: bool = False) -> None:
        """Tell the launchers to stop, once per kind of stop. A launcher that does not stop in time is ended by the
        engine (see `ControlLoop`). `brief`: the tasks will start again."""
        kind = "kill" if live.row.desired == "kill" else "stop"
        grace = 0.0 if kind == "kill" else live.job.grace
        if brief:
            grace = min(grace, _BRIEF_GRACE)
        due = [
            task for task in tasks if task.stop_sent not in (kind, "kill") and not task.over and task.ordered
        ]
        if not due:
            return
        for task in due:
            task.stop_sent = kind
            task.happened(TaskEvent.TOLD)
            margin = _KILL_MARGIN if kind == "kill" else _STOP_MARGIN
            task.stop_deadline = time.monotonic() + grace + margin
            task.killed_at = time.monotonic() if kind == "kill" else None
            task.telling = asyncio.ensure_future(self._tell(live, task, kind, grace))
        told, _ = await asyncio.wait([task.telling for task in due if task.telling], timeout=_TELL_WAIT)
        for one in told:
            one.result()
        if not brief and live.state is not RunState.STOPPING and self._on_request(live):
            await self._record(live, kind, grace)

    def _on_request(self, live: LiveRun) -> bool:
        """Whether the attempt was stopped or preempted, and did not end by itself."""
        return live.closing is not None and live.closing.cause in (Cause.STOPPED, Cause.PREEMPTED)

    async def _tell(self, live: LiveRun, task: LiveTask, kind: str, grace: float) -> None:
        """Stop by an order. If it cannot be written (user code put a directory there), the engine stops the task."""
        incarnation = task.incarnation
        found: list[Change] = []
        if task.ingester is not None:
            found = await asyncio.to_thread(task.ingester.reader.look_round, had_status=bool(task.reported))
        told = await asyncio.to_thread(self._write, live, task, kind, grace)
        if found:
            await self._ctx.committer.commit(live.redaction.changes(found))
        if told:
            return
        if live.attempt is None or task.incarnation != incarnation or task.gone is not None:
            return  # it was replaced meanwhile: the engine would end its successor
        engine = self._ctx.fleet.engine(live.engine)
        self._ctx.wakeups.spawn(engine.stop(live.handle, grace=timedelta(seconds=grace), tasks=[task.name]))

    def _write(self, live: LiveRun, task: LiveTask, kind: str, grace: float) -> bool:
        """False: the order cannot be written, and a retry would not help."""
        assert task.directory is not None
        try:
            current = task.directory.order()
            status = task.directory.status()
            # If user code removed the order, the status still has its number.
            seq = max(current.seq if current else 0, status.seq if status else 0)
            if current is None or current.verb != "stop" or (kind == "kill" and not current.kill):
                order = orders.stop_order(
                    seq=seq + 1, generation=task.generation, grace=grace, kill=kind == "kill"
                )
                task.directory.write_order(order)
        except OSError as exc:
            # The directory is gone (the engine will report that), the disk is full, or a link is in its place.
            log.warning("run %s: %s cannot be told to stop: %s", live.id, task.name, exc)
            self._ctx.wakeups.observe_from_anywhere()
            return not isinstance(exc, UnsafePath) and exc.errno not in _BLOCKED
        return True

    async def _record(self, live: LiveRun, kind: str, grace: float) -> None:
        assert live.attempt is not None
        state = live.after(RunEvent.STOP_SENT)
        text = {"stop": "asked to stop", "kill": "killed"}[kind] if live.row.desired != "run" else "preempted"
        await self._ctx.committer.commit(
            [
                UpdateRun(live.id, {"state": state}),
                UpdateAttempt(live.id, live.attempt.number, {"state": "stopping"}),
                AddEvent(EventRow(live.id, time.time(), "stopping", f"{text}; {grace:.0f} s of grace")),
            ]
        )
        live.update(state=state)
        self._ctx.notifier.publish(live.id)
