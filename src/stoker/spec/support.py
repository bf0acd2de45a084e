"""Keys that an engine cannot honour yet. They are refused by name, never silently ignored.

When an engine supports a key, its row here is removed and nothing else changes. `lost_after` and `lease` have no
row: on one machine they have no effect by design, because a loss is always proven there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.errors import Refused
from stoker.spec.names import input_path

if TYPE_CHECKING:
    from stoker.spec.job import Job


@dataclass(frozen=True)
class Row:
    key: str
    asked: Callable[[Job], bool]
    hint: str
    what: str = ""
    """The refused part of the key, where only a part is refused."""


_DATA = "Name a folder of this machine: `--input digits=file:///data/digits`."
_CLUSTER = "It is for clusters; leave `{key}` out to run on this machine."
_LATER = "Leave `{key}` out."


def _needs_launcher(job: Job) -> bool:
    """Only a launcher can give a task the addresses of the others."""
    return job.launcher == "none" and (job.workers.max > 1 or bool(job.roles) or job.framework is not None)


def _any(job: Job, key: str) -> bool:
    """Whether the job or any of its roles has this key."""
    return any(bool(getattr(one, key)) for one in (job, *job.roles.values()))


NOT_YET: dict[str, tuple[Row, ...]] = {
    "local": (
        Row("launcher", _needs_launcher, "Leave `launcher` out.", "`launcher: none` with several tasks"),
        Row("resources.disk", lambda job: job.resources.disk is not None, _LATER),
        Row(
            "inputs",
            lambda job: any(input_path(uri) is None for uri in job.inputs.values()),
            _DATA,
            "`inputs` other than `file:///PATH`",
        ),
        Row("idle", lambda job: job.idle is not None, _LATER),
        Row("exclusive", lambda job: job.exclusive, _CLUSTER),
        Row("pool", lambda job: job.pool is not None, _CLUSTER),
        Row("pod", lambda job: _any(job, "pod"), _CLUSTER),
        Row(
            "mounts",
            lambda job: any(source.startswith("pvc://") for source in job.mounts.values()),
            "Name a folder of this machine: `--mount /data=/home/me/data`.",
            "`mounts` of a claim",
        ),
        Row(
            "cluster",
            lambda job: job.cluster not in (None, "local", "any"),
            _CLUSTER,
            "`cluster` other than local or any",
        ),
    ),
    "kubernetes": (
        Row("launcher", _needs_launcher, "Leave `launcher` out.", "`launcher: none` with several tasks"),
        Row(
            "mounts",
            lambda job: any(source.startswith("/") for source in job.mounts.values()),
            "Put the files on a volume of the cluster and write `pvc://CLAIM/PATH`.",
            "`mounts` of a folder of one machine",
        ),
        Row("idle", lambda job: job.idle is not None, _LATER),
    ),
}

GIVEN = {
    "image": "with podman or docker",
    "args": "with an image",
    "roles.*.args": "with an image",
    "launcher": "`none` with an image",
    "mounts": "with an image",
    "python": "with an image",
    "resources.shm": "with an image",
}
"""What a key needs on this machine. The engine refuses the key where that is missing."""


def unsupported(job: Job, engine: str = "local") -> list[Refused]:
    """One error for each key of the job that the engine cannot honour yet."""
    return [
        Refused(
            f"{row.what or f'`{row.key}`'} is not yet available on the {engine} engine",
            hint=row.hint.format(key=row.key),
            details={"key": row.key, "engine": engine},
        )
        for row in NOT_YET.get(engine, ())
        if row.asked(job)
    ]


def refuse_unsupported(job: Job, engine: str = "local") -> None:
    """Raises one Refused that names every key the engine cannot honour yet."""
    found = unsupported(job, engine)
    if not found:
        return
    details = {"keys": [error.details["key"] for error in found], "engine": engine}
    if len(found) == 1:
        raise Refused(found[0].message, hint=found[0].hint, details={**found[0].details, **details})
    raise Refused("\n".join(_lines(found, engine)), details=details)


def _lines(found: Sequence[Refused], engine: str) -> list[str]:
    lines = [f"{len(found)} keys are not yet available on the {engine} engine"]
    for error in found:
        lines += [f"  {error.message}", f"    hint: {error.hint}"]
    return lines
