"""Kubeflow's MPIJob, v1 and v2beta1: a launcher that calls mpirun, and workers that wait to be called.

Stoker needs no ssh: the launchers of the tasks are the remote shell. So the workers' own command (sshd) is not run,
and keys about ssh have no meaning.
"""

from __future__ import annotations

from functools import partial
from pathlib import PurePosixPath

from stoker.spec import quantities
from stoker.spec.interop.assemble import Draft, Group, restarts
from stoker.spec.interop.kubeflow import old_policy, replicas, run_policy
from stoker.spec.interop.ledger import Level, View
from stoker.spec.interop.pods import Target
from stoker.spec.interop.single import BACKOFF
from stoker.spec.job import Job
from stoker.spec.quantities import MAX_WORKERS


def mpijob(document: View, draft: Draft, target: Target) -> Job | None:
    spec = document.child("spec", "mpijob")
    groups = replicas(spec, "mpiReplicaSpecs", ("Launcher", "Worker"), "mpi", target, wait="Worker")
    old_policy(spec)
    policy = run_policy(spec, draft, {}, usual="OnFailure")
    if groups:
        leads = [groups["Launcher"]] if "Launcher" in groups else list(groups.values())
        if all(group.piece.restart is None for group in leads):
            draft.retries(policy, "backoffLimit", BACKOFF)
        else:
            restarts(leads, draft, policy, "backoffLimit", usual="Never")
    draft.deadline(policy, int(draft.keys.get("retries", 0)))
    slots = spec.number("slotsPerWorker", partial(quantities.count, least=1, most=MAX_WORKERS))
    draft.keys |= {"framework": "mpi", "processes": slots or 1}
    implementation = spec.text("mpiImplementation")
    if implementation not in (None, "OpenMPI", "MPICH"):
        spec.note("mpiImplementation", "only Open MPI and MPICH work without ssh")
    if not groups:
        return None
    return _job(spec, draft, groups)


def _job(spec: View, draft: Draft, groups: dict[str, Group]) -> Job | None:
    launcher, worker = groups.get("Launcher"), groups.get("Worker")
    if launcher is None or worker is None:
        missing = "Launcher" if launcher is None else "Worker"
        spec.mistake("mpiReplicaSpecs", f"has no {missing}", "An MPIJob has one Launcher, and Workers.")
        return None
    if launcher.piece.words is None:
        where = launcher.piece.lines.get(("run",), launcher.piece.at)
        hint = 'Write its `command`, as in `[mpirun, -np, "2", python, train.py]`.'
        spec.ledger.mistake(where, "the launcher names no command", hint)
        return None
    words = worker.piece.words
    if words is not None and not any(
        PurePosixPath(word).name == "sshd" for text in words for word in text.split()
    ):
        where = worker.piece.lines[("run",)]
        spec.ledger.note(where, words, "workers run what the launcher starts, and no command of their own")
    elif words is not None:
        where = worker.piece.lines[("run",)]
        spec.ledger.note(where, words, "no sshd is needed: Stoker is the remote shell", Level.SAID)
    # The workers get the launcher's command: it is what they run, each with a rank.
    worker.piece.words, worker.piece.first = launcher.piece.words, launcher.piece.first
    worker.piece.variables, worker.piece.args = launcher.piece.variables, []
    return draft.job(worker, {"launcher": launcher})
