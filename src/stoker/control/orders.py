"""From a job and its place to what the launcher is told. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from stoker.engine.base import Surroundings
from stoker.spec import Job, setup_inputs
from stoker.spec.tree import Tree
from stoker.store.rows import RunRow
from stoker.task.formats import Order

_FALLBACK_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def run_order(
    run: RunRow,
    job: Job,
    *,
    seq: int,
    generation: int,
    around: Surroundings,
    setup: Mapping[str, Any] | None,
    resume_from: str | None,
) -> Order:
    return Order(
        seq=seq,
        generation=generation,
        verb="run",
        argv=command(run),
        env=environment(run, job, around),
        inherit=around.inherit,
        grace=job.grace,
        timeout=job.timeout,
        setup=dict(setup) if setup else None,
        resume_from=resume_from,
    )


def stop_order(job: Job, *, seq: int, generation: int, kill: bool) -> Order:
    return Order(seq=seq, generation=generation, verb="stop", grace=0.0 if kill else job.grace, kill=kill)


def release_order(*, seq: int, generation: int) -> Order:
    return Order(seq=seq, generation=generation, verb="release")


def command(run: RunRow) -> list[str]:
    """What the job says to run; else what its image would."""
    if run.command:
        return list(run.command)
    image = run.record.get("image") or {}
    return [str(part) for part in [*(image.get("entrypoint") or ()), *(image.get("cmd") or ())]]


def environment(run: RunRow, job: Job, around: Surroundings) -> dict[str, str]:
    """What the submitter's shell had that a program needs (recorded at submit, nothing secret), then the job's. In a
    container only the job's: the rest is the image's business."""
    env: dict[str, str] = {}
    if not around.inherit:
        recorded = run.record.get("environment") or {}
        env = {str(key): str(value) for key, value in recorded.items()}
        env.setdefault("PATH", _FALLBACK_PATH)
    if around.inputs and job.inputs:
        env["STOKER_INPUTS"] = around.inputs
        for name in job.inputs:
            env[f"STOKER_INPUT_{name.upper().replace('-', '_')}"] = f"{around.inputs}/{name}"
    env.update(job.env)
    return env


def setup_plan(
    setups: str, job: Job, run: RunRow, tree: Tree | None, around: Surroundings
) -> dict[str, Any] | None:
    """Which environment `setup` makes: one per content of its inputs, in the directory `setups`."""
    if job.setup is None:
        return None
    files = {entry.path: entry.sha256 for entry in tree.files} if tree else {}
    inputs = {path: files[path] for path in setup_inputs(job.setup, files)}
    env = environment(run, job, around)
    # PATH decides which python the environment is made from; other variables are the body's business.
    basis = {
        "command": job.setup.run,
        "inputs": inputs,
        "path": env.get("PATH", ""),
        "venv": env.get("VIRTUAL_ENV", ""),
    }
    if around.inherit:
        basis["image"] = (run.record.get("image") or {}).get("reference") or job.image or ""
    key = hashlib.sha256(json.dumps(basis, sort_keys=True).encode()).hexdigest()[:24]
    return {"command": job.setup.run, "directory": f"{setups}/{key}", "key": key}
