"""The cause of an ended attempt, and the next state of its run. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.engine.base import Observation
from stoker.spec.states import Cause, RunState
from stoker.task.formats import Ending
from stoker.task.units import readable_size

_FULL = ("No space left on device", "Disk quota exceeded")
"""Error texts of a program that dies because the disk is full, in any programming language."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    cause: Cause
    exit_code: int | None
    reason: str
    evidence: Mapping[str, Any]
    delay: float | None = None
    """Seconds until the next attempt. Set if neither the job nor the platform failed: this end is not counted."""


def judge(ending: Ending, *, desired: str) -> Outcome:
    """The outcome of an attempt whose launcher reported an ending."""
    evidence = _evidence(ending)
    code = _exit_code(ending)
    if ending.kind == "exit" and ending.code == 0:
        return Outcome(Cause.COMPLETED, 0, "completed", evidence)
    if ending.kind == "stopped":
        return stopped(code, desired, evidence)
    if ending.kind == "oom":
        return Outcome(Cause.OOM, code, _oom_text(ending), evidence)
    if ending.kind == "setup":
        return Outcome(Cause.SETUP, code, f"setup failed with exit code {ending.code}", evidence)
    if ending.kind == "timeout":
        return Outcome(
            Cause.TIMEOUT, code, f"still running after its timeout ({ending.seconds:.0f} s)", evidence
        )
    if ending.kind == "lost":
        return Outcome(Cause.LOST, None, ending.message or "its launcher was lost", evidence)
    if ending.kind == "disk":
        return Outcome(Cause.DISK, code, ending.message or "the disk is full", evidence)
    if ending.kind == "start-failed":
        return Outcome(Cause.USER_ERROR, code, ending.message or "the command could not be started", evidence)
    if ending.kind == "signal" and ending.signal == signal.SIGKILL:
        # Neither its limits nor its launcher ended it, and no program fails in this way by itself.
        return Outcome(Cause.LOST, code, "killed by SIGKILL from outside", evidence)
    if ending.kind == "signal" and ending.signal is not None:
        return Outcome(Cause.USER_ERROR, code, f"killed by {_signal_name(ending.signal)}", evidence)
    if any(sign in line for line in ending.last_lines[-5:] for sign in _FULL):
        return Outcome(Cause.DISK, code, f"exit code {ending.code}: the disk is full", evidence)
    reason = f"exit code {ending.code}" + (f": {ending.message}" if ending.message else "")
    return Outcome(Cause.USER_ERROR, code, reason, evidence)


def lost(proof: str, *, desired: str, last_lines: list[str]) -> Outcome:
    """The outcome of an attempt that vanished without an ending."""
    return gone(proof, None, desired=desired, last_lines=last_lines)


def gone(proof: str, seen: Observation | None, *, desired: str, last_lines: list[str]) -> Outcome:
    """The same with the engine's last observation, which may contain the cause."""
    evidence: dict[str, Any] = {"kind": "lost", "proof": proof, **(seen.evidence if seen else {})}
    if last_lines:
        evidence["last_lines"] = last_lines
    if desired in ("stop", "kill"):
        return Outcome(Cause.STOPPED, None, "stopped", evidence)
    cause = Cause(seen.cause) if seen is not None and seen.cause in list(Cause) else Cause.LOST
    code = evidence.get("exit_code")
    return Outcome(cause, code if type(code) is int else None, proof, evidence)


def hopeless(cause: str, text: str, patience: float, seen: Observation | None) -> Outcome:
    """The outcome of an attempt that did not start within `patience` seconds."""
    evidence: dict[str, Any] = {"message": text, **(seen.evidence if seen else {})}
    known = Cause(cause) if cause in list(Cause) else Cause.ENGINE_ERROR
    return Outcome(known, None, f"{text} (given up after {patience:.0f} s)", evidence)


@dataclass(frozen=True)
class Next:
    """The next state of the run."""

    state: RunState
    failures: int
    faults: int
    delay: float = 0.0
    reason: str = ""


def decide(
    verdict: Outcome,
    *,
    desired: str,
    retries: int,
    failures: int,
    faults: int,
    progressed: bool,
    fruitless: int,
    backoff: float,
    backoff_max: float,
    fault_retries: int,
) -> Next:
    """`progressed`: the attempt made a new checkpoint, so a retry is useful. `fruitless`: number of attempts in a row
    before it that made none."""
    cause = verdict.cause
    if cause is Cause.COMPLETED:
        return Next(RunState.SUCCEEDED, failures, 0, reason=verdict.reason)
    if desired in ("stop", "kill"):
        return Next(RunState.STOPPED, failures, faults, reason="stopped")
    if desired == "suspend":
        return Next(RunState.SUSPENDED, failures, 0, reason="suspended")
    if verdict.delay is not None:
        return Next(RunState.QUEUED, failures, faults, delay=verdict.delay, reason=verdict.reason)
    if cause.users_fault:
        failures += 1
        if failures > retries:
            spent = f" (retries: {retries} of {retries} spent)" if retries else ""
            return Next(RunState.FAILED, failures, faults, reason=verdict.reason + spent)
        rounds = 0 if progressed else fruitless
        text = f"{verdict.reason}; retry {failures} of {retries}"
        return Next(RunState.QUEUED, failures, 0, delay=_delay(rounds, backoff, backoff_max), reason=text)
    faults = 1 if progressed else faults + 1
    if faults > fault_retries:
        text = f"{verdict.reason}; given up after {fault_retries} tries without progress"
        return Next(RunState.FAILED, failures, faults, reason=text)
    delay = _delay(faults - 1, backoff, backoff_max)
    return Next(
        RunState.QUEUED,
        failures,
        faults,
        delay=delay,
        reason=f"{verdict.reason}; goes on from its checkpoint",
    )


def _delay(rounds: int, first: float, most: float) -> float:
    """No delay the first time, then doubling."""
    return 0.0 if rounds <= 0 else min(most, first * 2.0 ** min(rounds - 1, 30))


def stopped(code: int | None, desired: str, evidence: Mapping[str, Any]) -> Outcome:
    """The outcome of an attempt that was told to stop."""
    if desired in ("stop", "kill"):
        return Outcome(Cause.STOPPED, code, "stopped", evidence)
    return Outcome(Cause.PREEMPTED, code, "suspended" if desired == "suspend" else "preempted", evidence)


def _evidence(ending: Ending) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": ending.kind, "seconds": round(ending.seconds, 3)}
    if ending.code is not None:
        found["exit_code"] = ending.code
    if ending.signal is not None:
        found["signal"] = _signal_name(ending.signal)
    for name in ("message", "limit", "peak", "last_lines"):
        value = getattr(ending, name)
        if value:
            found[name] = value
    return found


def _exit_code(ending: Ending) -> int | None:
    if ending.code is not None:
        return ending.code
    if ending.signal is not None:
        return 128 + ending.signal
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _oom_text(ending: Ending) -> str:
    if not ending.limit:
        return "out of memory"
    peak = f", peak {readable_size(ending.peak)}" if ending.peak else ""
    return f"out of memory: limit {readable_size(ending.limit)}{peak}"
