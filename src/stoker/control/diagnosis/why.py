"""One paragraph about why a run waits or failed, and what to do about it. Pure."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.control.diagnosis.readiness import Readiness
from stoker.control.fleet import Wait
from stoker.frameworks.commands import is_python, words
from stoker.scheduling import Explanation
from stoker.spec.states import Cause, RunState
from stoker.store.rows import AttemptRow, CheckpointRow, EventRow, RunRow


@dataclass(frozen=True)
class WhyAnswer:
    text: str
    hint: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def explain(
    run: RunRow,
    *,
    explanation: Explanation | None,
    attempts: Sequence[AttemptRow],
    checkpoints: Sequence[CheckpointRow],
    now: float,
    trouble: str | None,
    wait: Wait | None = None,
    readiness: Readiness | None = None,
    events: Sequence[EventRow] = (),
) -> WhyAnswer:
    """`readiness`: readiness of a run with several tasks."""
    state = RunState(run.state)
    if trouble is not None and not state.terminal:
        return WhyAnswer(
            f"nothing is being started: {trouble}",
            "See `stoker server logs`; `stoker doctor` checks the machine.",
        )
    if state is RunState.QUEUED:
        return _queued(run, explanation, now)
    if state is RunState.FAILED:
        return _failed(run, attempts, checkpoints, events)
    if state is RunState.STARTING and readiness is not None and readiness.absent:
        return _gathering(run, readiness)
    if state is RunState.STARTING and wait is not None:
        return _waiting(run, wait)
    if state is RunState.STARTING:
        return WhyAnswer(
            f"attempt {run.attempt} is being brought up: code and checkpoint are placed, then setup runs"
        )
    if state is RunState.RUNNING:
        return _running(run, attempts, readiness, events)
    if state is RunState.STOPPING:
        return WhyAnswer(
            "it was asked to stop and has its grace period to write one more checkpoint",
            "`stoker stop --kill` ends it at once.",
        )
    if state is RunState.SUSPENDED:
        return WhyAnswer(
            "it is suspended: it holds nothing and waits to be resumed",
            f"`stoker resume {run.id}` puts it back into the queue.",
        )
    if state is RunState.STOPPED:
        return WhyAnswer("it was stopped by request", f"`stoker resume {run.id}` {_goes_on(checkpoints)}.")
    return WhyAnswer("it completed", f"`stoker pull {run.id}` brings its outputs.")


_WAIT_HINTS = {
    Cause.IMAGE: "Check the image's name, and that the cluster may pull it (`stoker cluster check`).",
    Cause.ENGINE_ERROR: "`stoker nodes` shows what the cluster has; ask for less, or wait for a node.",
}


def _gathering(run: RunRow, readiness: Readiness) -> WhyAnswer:
    """The gang starts once all tasks are up: name the missing ones."""
    first = next((one.wait for one in readiness.absent if one.wait is not None), None)
    found = _waiting(run, first or Wait(""), readiness.text())
    facts = {**found.facts, **_gang_facts(readiness)}
    return WhyAnswer(found.text, found.hint or "All tasks start together, or none.", facts)


def _gang_facts(readiness: Readiness) -> dict[str, Any]:
    return {
        "up": readiness.up,
        "tasks": readiness.size,
        "missing": {one.task: one.why for one in readiness.absent},
    }


def _waiting(run: RunRow, wait: Wait, reason: str = "") -> WhyAnswer:
    """The engine gives a reason why the attempt is not up. `reason`: replaces the engine's."""
    reason = reason or wait.text
    text = f"attempt {run.attempt} is not up yet: {reason}"
    facts: dict[str, Any] = {"waiting": reason, "since": round(time.monotonic() - wait.since, 1)}
    if not wait.cause:
        return WhyAnswer(text, None, facts)
    left = max(0.0, wait.patience - facts["since"])
    facts |= {"cause": wait.cause, "gives_up_in": round(left, 1)}
    hint = _WAIT_HINTS.get(Cause(wait.cause)) if wait.cause in list(Cause) else None
    return WhyAnswer(
        f"{text}; if that does not change it ends in {left:.0f} s as `{wait.cause}`", hint, facts
    )


def _queued(run: RunRow, explanation: Explanation | None, now: float) -> WhyAnswer:
    again = f" after {run.reason}" if run.reason and run.attempt else ""
    if run.not_before > now:
        wait = run.not_before - now
        text = f"it waits {wait:.0f} s before attempt {run.attempt + 1}{again}"
        return WhyAnswer(
            text,
            "The wait doubles with each failure in a row that made no progress.",
            {"not_before": run.not_before},
        )
    if explanation is None:
        return WhyAnswer(f"it is about to be queued{again}")
    place = (
        f"it is number {explanation.position} of {explanation.queued} in the queue: "
        if explanation.position
        else ""
    )
    facts: dict[str, Any] = {
        "place": explanation.position,
        "queued": explanation.queued,
        "behind": explanation.behind,
        "short": [
            {"resource": s.resource, "asked": s.asked, "free": s.free, "node": s.node}
            for s in explanation.short
        ],
        "holders": [{"run": h.id, "resource": h.resource, "amount": h.amount} for h in explanation.holders],
    }
    return WhyAnswer(
        place + explanation.reason + (f" (this is attempt {run.attempt + 1}{again})" if again else ""),
        _queue_hint(explanation),
        facts,
    )


def _queue_hint(explanation: Explanation) -> str | None:
    if explanation.state == "impossible":
        return "Ask for less with `stoker rerun --set resources...`, or wait for the node to come back (`stoker nodes`)."
    if explanation.holders:
        return f"`stoker stop {explanation.holders[0].id}` would free what it needs; `stoker nodes` shows which run holds what."
    if explanation.behind:
        return "A higher `priority` goes first; `stoker ps` shows the queue."
    return None


_FAILURE_HINTS = {
    Cause.OOM: "Ask for more memory (`--set resources.memory=...`), or use a smaller batch.",
    Cause.SETUP: "The setup command failed; its output is in `stoker logs {id}`. Fix it and `stoker rerun {id}`.",
    Cause.TIMEOUT: "Raise it: `stoker resume {id} --set timeout=...` {goes_on}.",
    Cause.IMAGE: "Fix the image's name or its login (`stoker cluster check`), then `stoker rerun {id}`.",
    Cause.LOST: "`stoker doctor` checks this machine; `stoker resume {id}` tries again.",
    Cause.ENGINE_ERROR: "`stoker doctor` checks this machine; `stoker resume {id}` tries again.",
    Cause.DISK: "Free some space (`stoker doctor` names the disk), then `stoker resume {id}`.",
}
_DEFAULT_HINT = "`stoker logs {id}` has the whole output; `stoker resume {id}` {goes_on}."


def _goes_on(checkpoints: Sequence[CheckpointRow]) -> str:
    if any(row.kept for row in checkpoints):
        return "goes on from its newest checkpoint"
    return "starts it again from the beginning: it has no checkpoint"


def _failed(
    run: RunRow,
    attempts: Sequence[AttemptRow],
    checkpoints: Sequence[CheckpointRow],
    events: Sequence[EventRow],
) -> WhyAnswer:
    last = attempts[-1] if attempts else None
    evidence = dict(last.evidence) if last else {}
    count = f" after {len(attempts)} attempts" if len(attempts) > 1 else ""
    text = f"it failed{count} with cause {run.cause}: {run.reason}"
    lines = [line for line in evidence.get("last_lines") or [] if line.strip()]
    if lines:
        text += f"; the last line it printed was: {lines[-1].strip()[:300]}"
    if run.cause == Cause.HANG:
        found = next((event for event in reversed(events) if event.kind == "hang"), None)
        text += f"; {found.text}" if found is not None and found.text not in text else ""
    kept = [row for row in checkpoints if row.kept]
    if kept:
        text += f"; {len(kept)} checkpoint(s) are kept, the newest is {kept[-1].name}"
    cause = Cause(run.cause) if run.cause else Cause.USER_ERROR
    hint = _command_hint(run, evidence, last.engine if last else "local")
    if hint is None:
        hint = _FAILURE_HINTS.get(cause, _DEFAULT_HINT).format(id=run.id, goes_on=_goes_on(checkpoints))
    return WhyAnswer(text, hint, {"cause": run.cause, "evidence": evidence})


def _command_hint(run: RunRow, evidence: Mapping[str, Any], engine: str) -> str | None:
    lines = evidence.get("last_lines") or []
    for line in reversed(lines):
        if name := missing_module(line):
            return _module_hint(run, name, engine)
        if "CUDA out of memory" in line:
            return "The GPU's memory is full: use a smaller batch, or a GPU with more."
        if "No such file or directory" in line:
            return "Only what is in the working directory and not ignored is shipped: check .gitignore and .stokerignore."
    if evidence.get("exit_code") == 127:
        return f"The command was not found on the PATH recorded at submit: {run.command[0] if run.command else ''}"
    return None


def missing_module(line: str) -> str | None:
    """The module that an import or `python -m` did not find, from a line of the output."""
    found = _MISSING.search(line)
    return found["quoted"] or found["bare"] if found else None


_MISSING = re.compile(
    r"ModuleNotFoundError: No module named '(?P<quoted>[^']+)'|^\S*python[\d.]*: No module named (?P<bare>\S+)"
)


def _module_hint(run: RunRow, module: str, engine: str) -> str:
    """Names the interpreter, and how to choose another."""
    package = module.partition(".")[0]
    setup = f"add `setup: pip install {package}` to the job"
    image = (run.record.get("image") or {}).get("asked") or run.job.get("image")
    if image or engine != "local":
        where = f"the Python of the image {image}" if image else "the Python of the cluster's default image"
        return f"{where} has no {package}: choose another image (`--image`), or {setup}."
    python = _interpreter(run)
    if run.job.get("setup"):
        return (
            f"The environment that `setup` made on {python} has no {package}: install it there, or {setup}."
        )
    return (
        f"{python} ran it and has no {package}. Install it there, or choose another Python: activate its environment where "
        f"you submit from, or write its path (`stoker run /path/to/python train.py`). Or {setup}."
    )


def _interpreter(run: RunRow) -> str:
    """The interpreter of a command on this machine, as far as its words and the submit tell."""
    named = next((word for word in words(run.command) if is_python(word)), None)
    if named is not None and "/" in named:
        return named
    return str(run.record.get("executable") or named or "python")


def _running(
    run: RunRow, attempts: Sequence[AttemptRow], readiness: Readiness | None, events: Sequence[EventRow]
) -> WhyAnswer:
    hint = f"`stoker logs -f {run.id}` shows what it prints."
    hang = hang_of(events)
    if hang is not None:
        return WhyAnswer(
            f"it runs, and it seems to hang: {hang.text}",
            f"`stoker logs {run.id}{_of_task(hang)}` says where its processes are; `hang: {{then: restart}}` starts "
            "such a run again by itself.",
            {"hang": {"t": hang.t, "text": hang.text, **hang.data}},
        )
    text = "it runs"
    if len(attempts) > 1:
        before = attempts[-2]
        text += f"; attempt {before.number} ended with cause {before.cause}, this is attempt {attempts[-1].number}"
    if readiness is None:
        return WhyAnswer(text, hint)
    if not readiness.started:
        missing = f": {readiness.text()}" if readiness.absent else ""
        return WhyAnswer(
            f"it re-forms: generation {readiness.generation} is being brought up{missing}{_trouble(events)}",
            hint,
            _gang_facts(readiness),
        )
    again = f", generation {readiness.generation}" if readiness.generation > 1 else ""
    last = _trouble(events) if readiness.generation > 1 else ""
    there = f"all {readiness.size}" if readiness.complete else f"{readiness.up} of {readiness.size}"
    more = f"; {', '.join(readiness.joining)} will join it" if readiness.joining else ""
    noun = "task" if readiness.size == 1 else "tasks"
    return WhyAnswer(f"{text} with {there} {noun}{again}{last}{more}", hint, _gang_facts(readiness))


def _of_task(hang: EventRow) -> str:
    task = hang.data.get("task")
    return f" --task {task}" if isinstance(task, str) else ""


def _trouble(events: Sequence[EventRow]) -> str:
    """Why the newest generation was started."""
    last = next((event for event in reversed(events) if event.kind == "reforming"), None)
    return f" (before that: {last.text.partition('; ')[0]})" if last is not None else ""


def hang_of(events: Sequence[EventRow]) -> EventRow | None:
    """The hang of the newest bodies, if they still hang: nothing has started or ended since."""
    for event in reversed(events):
        if event.kind == "hang":
            return event
        if event.kind in _MOVES:
            return None
    return None


_MOVES = ("starting", "running", "generation", "reforming", "requeued", "ended", "resumed", "checkpoint")
"""Kinds of events after which an earlier hang is over."""
