"""TensorFlow: TF_CONFIG, for MultiWorkerMirroredStrategy, ParameterServerStrategy and estimators."""

from __future__ import annotations

import json
from collections.abc import Sequence

from stoker.errors import SpecError
from stoker.frameworks.base import TaskCommand, World, WorldMember
from stoker.frameworks.world import body, endpoint, only_one, with_ranks
from stoker.spec.job import Job

_CLUSTER = ("chief", "worker", "ps")
_TYPES = {"master": "chief"}
"""Roles with another name in TensorFlow."""


class TensorFlow:
    name = "tensorflow"
    anchors = frozenset({"chief", "master", "worker", "ps"})

    def complete(self, job: Job) -> Job:
        chiefs = [name for name in ("chief", "master") if name in job.roles]
        if len(chiefs) > 1:
            raise SpecError("roles: chief and master are the same to TensorFlow", hint="Keep one of them.")
        for name in chiefs:
            if job.roles[name].count != 1:
                raise SpecError(f"roles.{name}.count: TensorFlow has one {name}", hint="Leave `count` out.")
        return only_one(job, "TensorFlow has one process in each task, which uses all its GPUs")

    def ports(self, role: str) -> int:
        return 1

    def body(self, world: World, member: WorldMember, job: Job, argv: Sequence[str]) -> TaskCommand:
        env, each = with_ranks(world, member)
        kind = _TYPES.get(member.role, member.role)
        if kind in (*_CLUSTER, "evaluator"):
            env["TF_CONFIG"] = json.dumps(
                {"cluster": _cluster(world), "task": {"type": kind, "index": member.index}}
            )
        return body(job, argv, env, each)


def _cluster(world: World) -> dict[str, list[str]]:
    """The cluster without the evaluator, which other tasks do not wait for."""
    found: dict[str, list[str]] = {}
    for member in world.members:
        kind = _TYPES.get(member.role, member.role)
        if kind in _CLUSTER:
            found.setdefault(kind, []).append(endpoint(member))
    return found


framework = TensorFlow()
