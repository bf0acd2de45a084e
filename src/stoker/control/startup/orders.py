"""Makes orders for launchers from jobs and places. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from stoker.engine.base import Surroundings
from stoker.frameworks.base import TaskCommand
from stoker.frameworks.commands import python_call
from stoker.spec import Job, setup_inputs
from stoker.spec.folder_extras import FolderExtras
from stoker.spec.names import input_path
from stoker.spec.roles import RoleTasks
from stoker.spec.tree import Tree
from stoker.store.rows import RunRow
from stoker.task.formats import Order

_FALLBACK_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def run_order(
    run: RunRow,
    job: Job,
    body: TaskCommand,
    *,
    seq: int,
    generation: int,
    around: Surroundings,
    timeout: float | None,
    hang_after: float | None,
    scan_every: float | None,
    setup: Mapping[str, Any] | None,
    threads: int | None,
    resume_from: str | None,
) -> Order:
    """`job`: as the task's role sees it."""
    extras = FolderExtras.of(run.record) if run.code is not None else FolderExtras()
    return Order(
        seq=seq,
        generation=generation,
        verb="run",
        argv=list(body.argv),
        env={**environment(run, job, around), **body.env},
        inherit=around.inherit,
        grace=job.grace,
        timeout=timeout,
        processes=[dict(one) for one in body.each],
        warm=warm(body, job),
        hang_after=hang_after,
        scan_every=scan_every,
        setup=dict(setup) if setup else None,
        threads=threads,
        resume_from=resume_from,
        folders=list(extras.folders),
        links=dict(extras.links) if around.here else {},
    )


def threads(cpu: float | None, processes: int) -> int | None:
    """The threads that fit one of the task's processes. `cpu`: what the task may use; None: not known."""
    return None if cpu is None else max(1, int(cpu / max(1, processes)))


def warm(body: TaskCommand, job: Job) -> dict[str, Any] | None:
    """What a standby process imports for the next generation; None: there is none."""
    call = python_call(body.argv) if body.preload and job.warm else None
    return {"python": call[0], "program": call[1], "modules": list(body.preload)} if call else None


def stop_order(*, seq: int, generation: int, grace: float, kill: bool) -> Order:
    return Order(seq=seq, generation=generation, verb="stop", grace=0.0 if kill else grace, kill=kill)


def release_order(*, seq: int, generation: int) -> Order:
    return Order(seq=seq, generation=generation, verb="release")


def command(run: RunRow, part: RoleTasks) -> list[str]:
    """The command of the role's job, or of its image; empty: not known."""
    if part.job.run is not None:
        return part.job.argv()
    image = image_of(run, part)
    if not image:
        return []  # the container runtime uses the image's own command
    return [
        str(word) for word in [*(image.get("entrypoint") or ()), *(part.job.args or image.get("cmd") or ())]
    ]


def image_of(run: RunRow, part: RoleTasks) -> Mapping[str, Any]:
    """The configuration of the role's image, as recorded at submit."""
    images: Mapping[str, Any] = run.record.get("images") or {}
    found: Mapping[str, Any] = images.get(part.role) or run.record.get("image") or {}
    return found


def shell_secrets(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the secrets that came from the submitter's shell. Tasks get them where they get its variables."""
    return tuple(str(name) for name in record.get("secrets") or ())


def task_secrets(run: RunRow, job: Job, around: Surroundings, values: Mapping[str, str]) -> dict[str, str]:
    """The secrets of a task. Those of the shell are left out in a container, and where the job's `env` has the name."""
    out = {name for name in shell_secrets(run.record) if around.inherit or name in job.env}
    return {name: value for name, value in values.items() if name in job.secrets or name not in out}


def environment(run: RunRow, job: Job, around: Surroundings) -> dict[str, str]:
    """The environment recorded at submit (without secrets), then the job's variables. In a container only the job's: the
    image has the others."""
    env: dict[str, str] = {}
    if not around.inherit:
        recorded = run.record.get("environment") or {}
        env = {str(key): str(value) for key, value in recorded.items()}
        env.setdefault("PATH", _FALLBACK_PATH)
    if around.inputs and job.inputs:
        env["STOKER_INPUTS"] = around.inputs
    for name, uri in job.inputs.items():
        place = f"{around.inputs}/{name}" if around.inputs else input_path(uri)
        if place is not None:
            env[f"STOKER_INPUT_{name.upper().replace('-', '_')}"] = place
    env.update(job.env)
    return env


def setup_plan(
    setups: str, job: Job, run: RunRow, tree: Tree | None, around: Surroundings
) -> dict[str, Any] | None:
    """The environment that `setup` makes in the directory `setups`: one for each content of its inputs."""
    if job.setup is None:
        return None
    files = {entry.path: entry.sha256 for entry in tree.files} if tree else {}
    inputs = {path: files[path] for path in setup_inputs(job.setup, files)}
    env = environment(run, job, around)
    # PATH and VIRTUAL_ENV decide which Python makes the environment; other variables only matter to the body.
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
