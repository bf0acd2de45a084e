"""`keep_on_failure`: how long an attempt that failed for good is held as it is, and where its files are left. Pure but for
the clock of what is still held."""

from __future__ import annotations

import time

from stoker.control.policy.outcome import Next, Outcome
from stoker.engine.base import ASIDE_FOR
from stoker.spec import Job
from stoker.spec.states import RunState
from stoker.store.rows import AttemptRow

_LONGEST = 7 * 86400.0
"""Seconds. A clock that jumped must not keep a GPU for ever."""


def until(job: Job, verdict: Outcome, following: Next, now: float) -> float:
    """The time until which the attempt is kept; 0: it is not."""
    wanted = job.keep_on_failure > 0 and following.state is RunState.FAILED and verdict.cause.users_fault
    return now + min(job.keep_on_failure, _LONGEST) if wanted else 0.0


def say(run: str, job: Job) -> str:
    return f"left as it is for {job.keep_on_failure:.0f} s: `stoker shell {run}` looks into it, `stoker stop {run}` lets it go"


def left(attempt: AttemptRow) -> float:
    """Seconds it is still kept."""
    value = attempt.evidence.get("kept_until")
    return min(value - time.time(), _LONGEST) if isinstance(value, int | float) else 0.0


def is_kept(attempt: AttemptRow) -> bool:
    return attempt.state == "ended" and left(attempt) > 0


def files_of(attempt: AttemptRow) -> str:
    """Where its files are left for a while when all else of it is removed; empty: nowhere. See `Recording.refusals`."""
    late = time.time() - (attempt.ended_at or 0.0) > ASIDE_FOR
    return "" if late else str(attempt.evidence.get("files") or "")


def name(attempt: AttemptRow) -> str:
    """By which the queue knows what it holds. No run's id has a tilde."""
    return f"{attempt.run}~{attempt.number}"
