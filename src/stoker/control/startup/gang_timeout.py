"""Gangs of which only some tasks come up: decides which is released. The rules are in `scheduling.gang_deadlock`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from stoker.control.context import Context
from stoker.control.policy import outcome
from stoker.control.state import LiveRun, LiveTask
from stoker.scheduling import Deadlock, LetGo, PartialGang
from stoker.spec.states import Cause


class GangTimeout:
    """Runs in the loop's thread."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._deadlock = Deadlock()
        self._known: set[str] = set()
        """Runs whose gang may be partly up."""
        self._decided: dict[str, LetGo] = {}

    def judge(self, live: LiveRun) -> outcome.Outcome | None:
        """A verdict if this run has to release all its tasks. Other runs that have to are kicked."""
        up = [task for task in live.tasks.values() if task.directory is not None]
        if not up or live.alone:
            return None
        live.first_up = live.first_up or time.monotonic()
        self._known.add(live.id)
        if live.id not in self._decided:
            for decided in self._deadlock.judge(self._partial_gangs(), time.monotonic()):
                self._decided[decided.id] = decided
                if decided.id != live.id:
                    self._ctx.wakeups.kick(self._ctx.runs[decided.id])
        found = self._decided.pop(live.id, None)
        return None if found is None else self._verdict(live, found)

    def _partial_gangs(self) -> list[PartialGang]:
        self._known = {id for id in self._known if _is_partial(self._ctx.runs.get(id))}
        return [_partial_gang(self._ctx.runs[id]) for id in sorted(self._known) if id not in self._decided]

    def _verdict(self, live: LiveRun, decided: LetGo) -> outcome.Outcome:
        self._known.discard(live.id)
        down = _down(live)
        why = next((task.wait.text for task in down if task.wait is not None), "")
        missing = ", ".join(task.name for task in down)
        text = f"{decided.reason} ({missing} missing{': ' + why if why else ''})"
        delay = None
        if _no_room(down):
            # A wait for room is no failure of the run: the next try only comes later each time.
            live.let_go += 1
            delay = decided.retry_after
        return outcome.Outcome(Cause.ENGINE_ERROR, None, text, {"message": text}, delay=delay)


def _partial_gang(live: LiveRun) -> PartialGang:
    assert live.first_up is not None
    down = _down(live)
    return PartialGang(
        id=live.id,
        up=len(live.tasks) - len(down),
        wanted=len(live.tasks),
        since=live.first_up,
        within=live.job.start_within,
        priority=live.row.priority,
        seq=live.row.seq,
        tries=live.let_go,
        no_room=_no_room(down),
        where=live.engine,
    )


def _is_partial(live: LiveRun | None) -> bool:
    return live is not None and live.attempt is not None and live.first_up is not None and bool(_down(live))


def _down(live: LiveRun) -> list[LiveTask]:
    return [task for task in live.tasks.values() if task.directory is None and not task.joining]


def _no_room(down: Sequence[LiveTask]) -> bool:
    return any(task.wait is not None and task.wait.no_room for task in down)
