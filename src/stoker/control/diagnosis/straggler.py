"""Which task slows the others down. Pure.

In synchronous training every rank has the same step rate, because all wait for the slowest. So the time between two
steps does not show the straggler. The compute time of each rank does, so it is used first. Without it, the task that
is busy while the others wait is named. If neither shows a straggler, the answer says so and does not guess.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SLOWER = 1.3
"""Multiple of the others' median from which on a task is named. Ranks always differ by some percent, and rank 0 logs and
saves for all."""
BUSY = 0.1
"""Cores below which a task counts as idle. Comparing idle tasks finds only noise."""
FULL = 95.0
"""Percent of GPU use that counts as full use."""
BEHIND = 0.1
"""Fraction of the others' steps by which a task must be behind to be named."""
QUIET = 60.0
"""Seconds without a line after which a task is named, if the others keep printing."""


@dataclass(frozen=True)
class Signs:
    """Measurements of one task. None: unknown."""

    task: str
    compute: float | None = None
    """Seconds of its own work per step, as the task reports them."""
    step_seconds: float | None = None
    """Seconds from one reported step to the next."""
    step: int | None = None
    cpu: float | None = None
    """Cores used recently."""
    gpu: float | None = None
    """Percent of its GPUs used recently."""
    quiet: float | None = None
    """Seconds since its newest line."""


@dataclass(frozen=True)
class StragglerFinding:
    """`task` None: no straggler, or it cannot be determined; the text says which."""

    task: str | None
    times: float | None
    source: str
    """compute | steps | gpu | cpu | log | none"""
    text: str

    def to_json(self) -> dict[str, object]:
        return {"task": self.task, "times": self.times, "source": self.source, "text": self.text}


def straggler(tasks: Sequence[Signs]) -> StragglerFinding | None:
    """`tasks`: the members of one world that do the same work. None: there is nothing to compare."""
    if len(tasks) < 2:
        return None
    for method in (_compute, _steps, _gpu, _cpu, _log):
        found = method(tasks)
        if found is not None:
            return found
    return None


def _compute(tasks: Sequence[Signs]) -> StragglerFinding | None:
    """By compute time: the only reliable figure for synchronous ranks."""
    known = _all(tasks, lambda task: task.compute)
    if known is None:
        return None
    worst, times = _worst(known)
    if times >= SLOWER:
        text = f"{worst} is {times:.1f}x slower than the others' median (from the compute time it reports)"
        return StragglerFinding(worst, round(times, 2), "compute", text)
    text = f"none: no task is more than {times:.2f}x slower than the others' median (from reported compute times)"
    return StragglerFinding(None, None, "compute", text)


def _steps(tasks: Sequence[Signs]) -> StragglerFinding | None:
    """By step rate, which differs only among tasks that do not wait for each other."""
    known = _all(tasks, lambda task: task.step_seconds)
    if known is not None:
        worst, times = _worst(known)
        if times >= SLOWER:
            text = f"{worst} is {times:.1f}x slower than the others' median (from reported steps)"
            return StragglerFinding(worst, round(times, 2), "steps", text)
    steps = _all(tasks, lambda task: None if task.step is None else float(task.step), zero=True)
    if steps is None:
        return None
    last = min(steps, key=lambda name: steps[name])
    others = _others(steps, last)
    behind = others - steps[last]
    if behind >= max(2.0, BEHIND * others):
        text = f"{last} is {behind:.0f} steps behind the others' median of {others:.0f} (from reported steps)"
        return StragglerFinding(last, None, "steps", text)
    return None


def _gpu(tasks: Sequence[Signs]) -> StragglerFinding | None:
    """By GPU use. Ranks that wait in an NCCL collective keep their GPU at 100%, so a lower one is probably the straggler.
    If the others are not at 100%, they wait idle and the busy one is."""
    known = _all(tasks, lambda task: task.gpu, zero=True)
    if known is None:
        return None
    low = min(known, key=lambda name: known[name])
    high = max(known, key=lambda name: known[name])
    if known[low] >= FULL:
        text = (
            "cannot be determined: every GPU is busy all the time, and tasks that wait in NCCL look as busy as the one "
            "they wait for; report `compute_seconds` per step to know"
        )
        return StragglerFinding(None, None, "gpu", text)
    if _others(known, low) >= FULL and known[low] * SLOWER <= _others(known, low):
        text = (
            f"probably {low}: its GPU is {known[low]:.0f}% busy while the others' are at {_others(known, low):.0f}%, as "
            "GPUs are that wait in NCCL; it may wait for its data (from GPU use)"
        )
        return StragglerFinding(low, None, "gpu", text)
    others = _others(known, high)
    if known[high] >= 20.0 and known[high] >= SLOWER * max(others, 1.0):
        text = (
            f"probably {high}: its GPU is {known[high]:.0f}% busy while the others' are at {others:.0f}% and seem to wait "
            "(from GPU use)"
        )
        return StragglerFinding(high, round(known[high] / max(others, 1.0), 2), "gpu", text)
    return None


def _cpu(tasks: Sequence[Signs]) -> StragglerFinding | None:
    """By CPU use, without GPUs. Gloo sleeps while it waits, so the busy task is the straggler. Open MPI spins: all tasks
    are busy then, and none is named."""
    known = _all(tasks, lambda task: task.cpu, zero=True)
    if known is None or any(task.gpu is not None for task in tasks):
        return None
    high = max(known, key=lambda name: known[name])
    others = _others(known, high)
    if known[high] >= BUSY and known[high] >= SLOWER * max(others, 0.01):
        text = (
            f"probably {high}: it uses {known[high]:.2f} CPUs while the others use {others:.2f} and seem to wait "
            "(from CPU use; a task that others crowd out of its CPU is not seen this way)"
        )
        return StragglerFinding(high, round(known[high] / max(others, 0.01), 2), "cpu", text)
    return None


def _log(tasks: Sequence[Signs]) -> StragglerFinding | None:
    """By output, if every task prints: the one that stopped printing."""
    known = _all(tasks, lambda task: task.quiet, zero=True)
    if known is None:
        return None
    last = max(known, key=lambda name: known[name])
    others = _others(known, last)
    if known[last] >= QUIET and known[last] >= 10 * max(others, 1.0):
        text = f"perhaps {last}: it last printed {known[last]:.0f} s ago, the others {others:.0f} s ago (from their output)"
        return StragglerFinding(last, None, "log", text)
    return None


def _all(
    tasks: Sequence[Signs], take: Callable[[Signs], float | None], *, zero: bool = False
) -> dict[str, float] | None:
    """The figure of every task. None: it is unknown for one of them, so nothing can be concluded."""
    found = {task.task: take(task) for task in tasks}
    known = {name: value for name, value in found.items() if value is not None and (zero or value > 0)}
    return known if len(known) == len(tasks) else None


def _worst(known: dict[str, float]) -> tuple[str, float]:
    """The slowest task, and its multiple of the others' median."""
    worst = max(known, key=lambda name: known[name])
    return worst, known[worst] / _others(known, worst)


def _others(known: dict[str, float], name: str) -> float:
    """Median without `name`: of two tasks, its own figure would be half of the median."""
    return statistics.median(value for other, value in known.items() if other != name)
