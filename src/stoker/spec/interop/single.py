"""Kinds of Kubernetes itself: a Pod, and a Job with as many tasks as completions."""

from __future__ import annotations

from functools import partial

from stoker.spec import quantities
from stoker.spec.interop import expansion
from stoker.spec.interop.assemble import RESTARTS, Draft, Group
from stoker.spec.interop.ledger import Level, View
from stoker.spec.interop.pods import Piece, Target, piece
from stoker.spec.job import Job
from stoker.spec.quantities import MAX_WORKERS

BACKOFF = 6
"""The default of Kubernetes."""
_count = partial(quantities.count, most=MAX_WORKERS)


def pod(document: View, draft: Draft, target: Target) -> Job | None:
    found = piece(document, target)
    path = (*found.at, "spec", "restartPolicy")
    if found.restart == "OnFailure":
        draft.keys["retries"] = RESTARTS
        draft.ledger.note(
            path, "OnFailure", f"Kubernetes restarts it without end; Stoker {RESTARTS} times", Level.SAID
        )
    elif found.restart == "Always":
        draft.ledger.note(path, "Always", "a run that succeeded or failed has ended", Level.SAID)
    return draft.job(Group(found), {})


def job(document: View, draft: Draft, target: Target) -> Job | None:
    spec = document.child("spec", "job")
    found = piece(spec.child("template", "template"), target)
    if found.restart == "Always":
        draft.ledger.mistake(
            (*found.at, "spec", "restartPolicy"),
            '"Always" is not for a Job: it would never be done',
            "Write `Never` or `OnFailure`.",
        )
    retries = draft.retries(spec, "backoffLimit", BACKOFF)
    draft.deadline(spec, retries)
    draft.suspended(spec)
    workers = _tasks(spec, draft, found)
    if workers > 1:
        draft.keys["on_loss"] = "task"
        draft.ledger.note(spec.path("parallelism"), workers, "all tasks start together, or none", Level.SAID)
    return draft.job(Group(found, workers), {})


def _tasks(spec: View, draft: Draft, found: Piece) -> int:
    """The number of workers. If there are more completions than run at a time, each worker runs several in turn."""
    parallel, completions = spec.number("parallelism", _count), spec.number("completions", _count)
    mode = spec.text("completionMode") or "NonIndexed"
    if mode not in ("NonIndexed", "Indexed"):
        spec.mistake("completionMode", f"{mode!r} is neither Indexed nor NonIndexed", "Write `Indexed`.")
    if mode == "Indexed" and completions is None:
        spec.mistake("completions", "is missing; an Indexed Job needs it", "Write how many there are.")
    if parallel == 0:
        spec.note("parallelism", "a run starts when it is submitted; submit it when it is to start")
    at_once = parallel or 1
    if completions is None:
        return at_once
    if completions == 0:
        spec.mistake("completions", "0 leaves nothing to run", "Write how many there are.")
        return 1
    if completions <= at_once:
        return completions
    if found.words is None:
        spec.note(
            "completions",
            f"more than run at a time ({at_once}), and the image's own command cannot be repeated; write `command`",
        )
        return at_once
    why = f"each of {at_once} workers runs its share one after the other; a worker that fails starts its share again"
    spec.note("completions", why, Level.SAID)
    run = expansion.looped(found.words, found.variables, found.first, completions, at_once)
    found.words, found.first = ["/bin/sh", "-c", expansion.escaped(run)], []
    return at_once
