"""What users submit: the job file, its keys and values, and trees of files.

Importing this package is cheap: names that need pydantic are loaded when they are first used, so that the
command line can build its options from `FLAGS` without it.

job              Job: the validated, normalised job
keys             every key of a job file, in one table
load             job files to jobs; reports all mistakes at once
problems         mistakes: described, located, combined
yaml12           YAML 1.2, with line numbers
schema           the JSON Schema of a job file
reference        docs/job-file.md
flags            the flags of `stoker run`
from_flags       a job from flags
quantities       sizes, durations, cores, counts
names            names that users choose
setup            which files a `setup` depends on
support          keys that an engine cannot honour yet
roles            RoleTasks: a group of equal tasks of a job
interop/         manifests of Kubernetes and Kubeflow to jobs and back
tree             a directory as a value
folder_extras    what a working folder has and a tree does not: links out of it, empty folders
globs            the patterns of .gitignore
kept_files       which files of a working folder are kept
states           states of runs, causes
transitions      tables of transitions
run_transitions  the table of a run's states
refusals         warnings about refused checkpoints
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.spec.from_flags import job_from_flags
    from stoker.spec.job import Job
    from stoker.spec.load import load_job, override_job, parse_job
    from stoker.spec.reference import reference_markdown
    from stoker.spec.schema import job_schema
    from stoker.spec.setup import setup_inputs
    from stoker.spec.support import refuse_unsupported

_HOMES = {
    "Job": "job",
    "job_from_flags": "from_flags",
    "job_schema": "schema",
    "load_job": "load",
    "override_job": "load",
    "parse_job": "load",
    "reference_markdown": "reference",
    "refuse_unsupported": "support",
    "setup_inputs": "setup",
}

__all__ = [
    "Job",
    "job_from_flags",
    "job_schema",
    "load_job",
    "override_job",
    "parse_job",
    "reference_markdown",
    "refuse_unsupported",
    "setup_inputs",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"stoker.spec.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
