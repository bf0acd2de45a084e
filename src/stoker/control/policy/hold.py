"""`keep_on_failure`: how long a finally failed attempt is held unchanged, and where its files are. Pure, except for the
clock."""

from __future__ import annotations

import time

from stoker.control.policy.outcome import Next, Outcome
from stoker.engine.base import ASIDE_FOR
from stoker.spec import Job
from stoker.spec.states import RunState
from stoker.store.rows import AttemptRow

_LONGEST = 7 * 86400.0
"""Seconds. A clock that jumps must not hold a GPU forever."""


def until(job: Job, verdict: Outcome, following: Next, now: float) -> float:
    """Time until which the attempt is held; 0: not held."""
    wanted = job.keep_on_failure > 0 and following.state is RunState.FAILED and verdict.cause.users_fault
    return now + min(job.keep_on_failure, _LONGEST) if wanted else 0.0


def say(run: str, job: Job) -> str:
    return f"held for {job.keep_on_failure:.0f} s: `stoker shell {run}` opens a shell in it, `stoker stop {run}` releases it"


def left(attempt: AttemptRow) -> float:
    """Seconds for which the attempt is still held."""
    value = attempt.evidence.get("kept_until")
    return min(value - time.time(), _LONGEST) if isinstance(value, int | float) else 0.0


def is_kept(attempt: AttemptRow) -> bool:
    return attempt.state == "ended" and left(attempt) > 0


def files_of(attempt: AttemptRow) -> str:
    """Directory where the attempt's files stay for a while after the rest of it was removed. Empty: none. See
    `Recording.refusals`."""
    late = time.time() - (attempt.ended_at or 0.0) > ASIDE_FOR
    return "" if late else str(attempt.evidence.get("files") or "")


def name(attempt: AttemptRow) -> str:
    """The held attempt's name in the queue. Run ids never contain a tilde."""
    return f"{attempt.run}~{attempt.number}"
