"""From a job and its place to what the launcher is told. Pure."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.settings import Home
from stoker.spec import Job
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
    setup: Mapping[str, Any] | None,
    resume_from: str | None,
) -> Order:
    return Order(
        seq=seq,
        generation=generation,
        verb="run",
        argv=list(run.command),
        env=environment(run, job),
        grace=job.grace,
        timeout=job.timeout,
        setup=dict(setup) if setup else None,
        resume_from=resume_from,
    )


def stop_order(job: Job, *, seq: int, generation: int, kill: bool) -> Order:
    return Order(seq=seq, generation=generation, verb="stop", grace=0.0 if kill else job.grace, kill=kill)


def release_order(*, seq: int, generation: int) -> Order:
    return Order(seq=seq, generation=generation, verb="release")


def environment(run: RunRow, job: Job) -> dict[str, str]:
    """What the submitter's shell had that a program needs (recorded at submit, nothing secret), then the job's."""
    recorded = run.record.get("environment") or {}
    env = {str(key): str(value) for key, value in recorded.items()}
    env.setdefault("PATH", _FALLBACK_PATH)
    env.update(job.env)
    return env


def setup_plan(home: Home, job: Job, run: RunRow, tree: Tree | None) -> dict[str, Any] | None:
    """Which environment `setup` makes: one per content of its inputs."""
    if job.setup is None:
        return None
    command, named = job.setup.run, job.setup.inputs
    files = {entry.path: entry.sha256 for entry in tree.files} if tree else {}
    inputs = _chosen(files, named) if named else _guessed(files, command)
    env = environment(run, job)
    # PATH decides which python the environment is made from; other variables are the body's business.
    basis = {"command": command, "inputs": inputs, "path": env["PATH"], "venv": env.get("VIRTUAL_ENV", "")}
    key = hashlib.sha256(json.dumps(basis, sort_keys=True).encode()).hexdigest()[:24]
    return {"command": command, "directory": str(home.setups / key), "key": key}


_INSTALL_ONLY = re.compile(r"^\s*(python3?\s+-m\s+)?(uv\s+)?pip3?\s+install\s+[^;&|`$<>]*$")


def _guessed(files: Mapping[str, str], command: str) -> dict[str, str]:
    """The files a setup command depends on. Those it names, and what they include; the whole tree when that
    cannot be told (`make`, a script): running again is slow, not running again is wrong."""
    if not _INSTALL_ONLY.match(command):
        return dict(files)
    words = shlex.split(command)
    if any(word == "." or word.startswith("./") or word in ("-e", "--editable") for word in words):
        return dict(files)
    found = {path: files[path] for word in words for path in (os.path.normpath(word),) if path in files}
    if any(word in ("-r", "-c", "--requirement", "--constraint") for word in words):
        # A requirements file may include others: every text file that could be one counts.
        found.update(
            {path: digest for path, digest in files.items() if fnmatch.fnmatch(path, "*require*.txt")}
        )
        found.update(
            {path: digest for path, digest in files.items() if fnmatch.fnmatch(path, "*constraint*.txt")}
        )
    return found


def _chosen(files: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    return {path: digest for path, digest in files.items() if any(fnmatch.fnmatch(path, p) for p in patterns)}
