"""Who holds the others up. Pure.

In synchronous training every rank has the same step rate, because all wait for the slowest: the time between two steps
tells nobody apart. What does is the time that a rank works for itself, so that is asked for first; without it, who is
busy while the others wait. Where neither can tell, that is said instead of a guess.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SLOWER = 1.3
"""Times the others' median from which on somebody is named. Ranks differ by some percent always, and rank 0 logs and
saves for all."""
BUSY = 0.1
"""Cores below which a task counts as idle: comparing idle tasks finds noise."""
FULL = 95.0
"""Percent of GPU use that counts as all of it."""
BEHIND = 0.1
"""Part of the others' steps that somebody who goes at his own pace is behind when he is named."""
QUIET = 60.0
"""Seconds without a line that count, when the others print all the time."""


@dataclass(frozen=True)
class Signs:
    """What is known of one task. None: nothing."""

    task: str
    compute: float | None = None
    """Seconds of its own work per step, as it reports them itself."""
    step_seconds: float | None = None
    """Seconds from one reported step to the next."""
    step: int | None = None
    cpu: float | None = None
    """Cores in use lately."""
    gpu: float | None = None
    """Percent of its GPUs in use lately."""
    quiet: float | None = None
    """Seconds since its newest line."""


@dataclass(frozen=True)
class StragglerFinding:
    """`task` None: nobody, or nobody can tell; the text says which."""

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
    for ask in (_compute, _steps, _gpu, _cpu, _log):
        found = ask(tasks)
        if found is not None:
            return found
    return None


def _compute(tasks: Sequence[Signs]) -> StragglerFinding | None:
    """The time each works for itself: the only figure that tells synchronous ranks apart for certain."""
    known = _all(tasks, lambda task: task.compute)
    if known is None:
        return None
    worst, times = _worst(known)
    if times >= SLOWER:
        text = f"{worst} is {times:.1f}x slower than the others' median (from the compute time it reports)"
        return StragglerFinding(worst, round(times, 2), "compute", text)
    text = (
        f"none: nobody is more than {times:.2f}x slower than the others' median (from reported compute times)"
    )
    return StragglerFinding(None, None, "compute", text)


def _steps(tasks: Sequence[Signs]) -> StragglerFinding | None:
    """Only those who do not wait for each other have paces of their own."""
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
    """Ranks that wait in a collective of NCCL keep their GPU at 100%, so the one that is not may be who they wait for;
    where the others are not at 100% they wait idle, and the busy one is."""
    known = _all(tasks, lambda task: task.gpu, zero=True)
    if known is None:
        return None
    low = min(known, key=lambda name: known[name])
    high = max(known, key=lambda name: known[name])
    if known[low] >= FULL:
        text = (
            "cannot be told: every GPU is busy all the time, and those that wait in NCCL look as busy as the one they "
            "wait for; report `compute_seconds` per step to know"
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
    """Without GPUs: gloo waits asleep, so the busy one is who the others wait for. Open MPI spins: then all are busy, and
    nobody stands out."""
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
    """Where everybody prints: the one that stopped."""
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
    """The figure of every task; None where one of them has none: a part of them proves nothing."""
    found = {task.task: take(task) for task in tasks}
    known = {name: value for name, value in found.items() if value is not None and (zero or value > 0)}
    return known if len(known) == len(tasks) else None


def _worst(known: dict[str, float]) -> tuple[str, float]:
    """Who is slowest, and how many times the others' median that is."""
    worst = max(known, key=lambda name: known[name])
    return worst, known[worst] / _others(known, worst)


def _others(known: dict[str, float], name: str) -> float:
    """The median of the others: with two, his own figure would be half of it."""
    return statistics.median(value for other, value in known.items() if other != name)
