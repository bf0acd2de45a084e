"""Telling tasks to stop."""

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
"""Seconds beyond the grace that a launcher has for its ladder, its last scan and its last lines."""
_KILL_MARGIN = 5.0
"""The same for one that is to kill its processes at once."""
_TELL = 2.0
"""Seconds that are waited until all are told. One that does not answer must not keep us from seeing that others stopped."""
_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ELOOP)
"""What is no longer a file, because the run made something else of it. A task that is out of reach is another matter."""
_BRIEF = 10.0
"""Seconds of grace for those whose world is broken: what they wait for will not come."""


class Shutdown:
    """Runs in the loop's thread."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    async def stop(self, live: LiveRun, tasks: Sequence[LiveTask], *, brief: bool = False) -> None:
        """Tell the launchers, once per kind of stop; one that does not answer in time is ended. `brief`: only to start
        again."""
        kind = "kill" if live.row.desired == "kill" else "stop"
        grace = 0.0 if kind == "kill" else live.job.grace
        if brief:
            grace = min(grace, _BRIEF)
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
        told, _ = await asyncio.wait([task.telling for task in due if task.telling], timeout=_TELL)
        for one in told:
            one.result()
        if not brief and live.state is not RunState.STOPPING and self._asked(live):
            await self._say(live, kind, grace)

    def _asked(self, live: LiveRun) -> bool:
        """Somebody wants it to end; it did not come to its end by itself."""
        return live.closing is not None and live.closing.cause in (Cause.STOPPED, Cause.PREEMPTED)

    async def _tell(self, live: LiveRun, task: LiveTask, kind: str, grace: float) -> None:
        """By an order. Where the run put something in the way of that (a directory in its place), by the engine."""
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
            return  # it was replaced meanwhile: the engine would end the one that came after it
        engine = self._ctx.fleet.engine(live.engine)
        self._ctx.wakeups.spawn(engine.stop(live.handle, grace=timedelta(seconds=grace), tasks=[task.name]))

    def _write(self, live: LiveRun, task: LiveTask, kind: str, grace: float) -> bool:
        """False: something is in the way, and will be the next time too."""
        assert task.directory is not None
        try:
            current = task.directory.order()
            status = task.directory.status()
            # Where user code removed the order, the launcher still knows its number.
            seq = max(current.seq if current else 0, status.seq if status else 0)
            if current is None or current.verb != "stop" or (kind == "kill" and not current.kill):
                order = orders.stop_order(
                    seq=seq + 1, generation=task.generation, grace=grace, kill=kind == "kill"
                )
                task.directory.write_order(order)
        except OSError as exc:
            # The directory is gone, then presence will say so; or something is in the way: a full disk, a link.
            log.warning("run %s: %s cannot be told to stop: %s", live.id, task.name, exc)
            self._ctx.wakeups.observe_from_anywhere()
            return not isinstance(exc, UnsafePath) and exc.errno not in _IN_THE_WAY
        return True

    async def _say(self, live: LiveRun, kind: str, grace: float) -> None:
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
