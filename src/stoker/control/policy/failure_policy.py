"""What follows for an attempt when one of its tasks ends: nothing, another body, another generation, or its end. Pure.

The roles have the rules. `on_loss`: what the loss of a task means. `ends`: the end of these tasks ends the run.
`may_fail`: a failure does not count. The end of a task that was told to stop has no meaning. The task that failed
first by itself determines the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.control.policy.outcome import Outcome
from stoker.spec.states import Cause


@dataclass(frozen=True)
class TaskState:
    """Input of the decision: one task."""

    task: str
    on_loss: str
    ends: bool
    may_fail: bool
    verdict: Outcome | None = None
    """None: it is running, or about to."""
    told: bool = False
    ended: float = 0.0
    idle: bool = False
    """It has no order for its next generation yet: there is nothing to stop."""

    @property
    def failed(self) -> bool:
        """Whether it failed by itself and the failure counts."""
        return (
            self.verdict is not None
            and self.verdict.cause is not Cause.COMPLETED
            and not self.told
            and not self.may_fail
            and self.on_loss != "ignore"
        )


@dataclass(frozen=True)
class Decision:
    stop: tuple[str, ...] = ()
    """Tell these tasks to stop, unless they were told already."""
    end: Outcome | None = None
    """The attempt ends with this outcome."""
    close: Outcome | None = None
    """The attempt will end with this outcome once all tasks have stopped."""
    reform: Outcome | None = None
    """All tasks of the world have ended because of this: the next generation may start."""
    trouble: Outcome | None = None
    """All tasks of the world must end because of this."""
    again: tuple[str, ...] = ()
    """Only these tasks get another body."""


def decide(tasks: Sequence[TaskState], *, closing: Outcome | None, reforming: Outcome | None) -> Decision:
    running = tuple(task.task for task in tasks if task.verdict is None)
    if closing is not None:
        return Decision(end=closing) if not running else Decision(stop=running)
    ending = [task for task in tasks if task.ends]
    if ending and all(task.verdict is not None for task in ending):
        final = _final(ending)
        if final is not None:
            return Decision(end=final) if not running else Decision(stop=running, close=final)
    world = [task for task in tasks if task.on_loss == "world"]
    failed = [task for task in world if task.failed]
    if failed or reforming is not None:
        left = tuple(task.task for task in world if task.verdict is None and not task.idle)
        cause = root(failed, alone=len(tasks) == 1) if failed else reforming
        return Decision(reform=cause) if not left else Decision(stop=left, trouble=cause)
    again = tuple(task.task for task in tasks if task.on_loss == "task" and task.failed)
    return Decision(again=again)


def root(failed: Sequence[TaskState], *, alone: bool) -> Outcome:
    """The outcome of the task that failed first. When one task dies, the others lose their connections and die too. So
    ends that cannot be a consequence of another task's death come first, then the earlier end."""
    first = min(failed, key=lambda task: (_may_be_consequence(task.verdict), task.ended))
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


def _may_be_consequence(verdict: Outcome | None) -> bool:
    """Whether it may be the consequence of another task's death: an exception or an abort."""
    if verdict is None or verdict.cause is not Cause.USER_ERROR:
        return False
    return verdict.evidence.get("signal") in (None, "SIGABRT", "SIGPIPE")


def _final(ending: Sequence[TaskState]) -> Outcome | None:
    """The outcome of the run, once all tasks of `ends` have ended. None: the run goes on."""
    matter = [task for task in ending if not task.may_fail] or list(ending)
    if any(task.failed or _was_cut_short(task) for task in matter):
        return None
    done = [task.verdict for task in matter if task.verdict is not None]
    bad = [verdict for verdict in done if verdict.cause is not Cause.COMPLETED]
    if bad and all(task.on_loss == "ignore" for task in matter):
        good = [verdict for verdict in done if verdict.cause is Cause.COMPLETED]
        return good[0] if good else bad[0]
    return bad[0] if bad else done[0]


def _was_cut_short(task: TaskState) -> bool:
    return task.told and task.verdict is not None and task.verdict.cause is not Cause.COMPLETED
