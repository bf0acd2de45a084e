"""What becomes of an attempt when one of its tasks ends: nothing, another body, another generation, or the end. Pure.

The rules are the roles': `on_loss` says what a loss means, `ends` whose end is the run's, `may_fail` whose failure is
nobody's. A task that was told to stop says nothing by its end; the cause of a trouble is who failed of its own first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.control.policy.outcome import Outcome
from stoker.spec.states import Cause


@dataclass(frozen=True)
class TaskState:
    """A task as the decision sees it."""

    task: str
    on_loss: str
    ends: bool
    may_fail: bool
    verdict: Outcome | None = None
    """None: it runs, or is about to."""
    told: bool = False
    ended: float = 0.0
    idle: bool = False
    """It has no order yet for what comes next: nothing of it runs, and there is nothing to stop."""

    @property
    def failed(self) -> bool:
        """Ended, not well, of its own, and it matters."""
        return (
            self.verdict is not None
            and self.verdict.cause is not Cause.COMPLETED
            and not self.told
            and not self.may_fail
            and self.on_loss != "ignore"
        )


@dataclass(frozen=True)
class Decision:
    """What to do now."""

    stop: tuple[str, ...] = ()
    """These are told to stop, where they were not yet."""
    end: Outcome | None = None
    """The attempt is over, and this is how."""
    close: Outcome | None = None
    """It will be, as soon as everybody has stopped."""
    reform: Outcome | None = None
    """The world is empty because of this: it may start again."""
    trouble: Outcome | None = None
    """The world has to be emptied because of this."""
    again: tuple[str, ...] = ()
    """These alone get another body."""


def decide(seats: Sequence[TaskState], *, closing: Outcome | None, reforming: Outcome | None) -> Decision:
    running = tuple(seat.task for seat in seats if seat.verdict is None)
    if closing is not None:
        return Decision(end=closing) if not running else Decision(stop=running)
    ending = [seat for seat in seats if seat.ends]
    if ending and all(seat.verdict is not None for seat in ending):
        final = _final(ending)
        if final is not None:
            return Decision(end=final) if not running else Decision(stop=running, close=final)
    world = [seat for seat in seats if seat.on_loss == "world"]
    failed = [seat for seat in world if seat.failed]
    if failed or reforming is not None:
        left = tuple(seat.task for seat in world if seat.verdict is None and not seat.idle)
        cause = root(failed, alone=len(seats) == 1) if failed else reforming
        return Decision(reform=cause) if not left else Decision(stop=left, trouble=cause)
    again = tuple(seat.task for seat in seats if seat.on_loss == "task" and seat.failed)
    return Decision(again=again)


def root(failed: Sequence[TaskState], *, alone: bool) -> Outcome:
    """Who failed first. When one dies the others lose their connections and die too: what cannot follow from another
    one's death counts before what can, then the earlier end."""
    first = min(failed, key=lambda seat: (_follows(seat.verdict), seat.ended))
    assert first.verdict is not None
    if alone:
        return first.verdict
    verdict = first.verdict
    return Outcome(
        verdict.cause,
        verdict.exit_code,
        f"{first.task}: {verdict.reason}",
        {**verdict.evidence, "task": first.task},
    )


def _follows(verdict: Outcome | None) -> bool:
    """Whether it may well be the consequence of another end: an exception, an abort."""
    if verdict is None or verdict.cause is not Cause.USER_ERROR:
        return False
    return verdict.evidence.get("signal") in (None, "SIGABRT", "SIGPIPE")


def _final(ending: Sequence[TaskState]) -> Outcome | None:
    """How the run ended, where all have ended whose end is its end; None: that is not the end yet."""
    matter = [seat for seat in ending if not seat.may_fail] or list(ending)
    if any(seat.failed or _cut_short(seat) for seat in matter):
        return None
    done = [seat.verdict for seat in matter if seat.verdict is not None]
    bad = [verdict for verdict in done if verdict.cause is not Cause.COMPLETED]
    if bad and all(seat.on_loss == "ignore" for seat in matter):
        good = [verdict for verdict in done if verdict.cause is Cause.COMPLETED]
        return good[0] if good else bad[0]
    return bad[0] if bad else done[0]


def _cut_short(seat: TaskState) -> bool:
    return seat.told and seat.verdict is not None and seat.verdict.cause is not Cause.COMPLETED
