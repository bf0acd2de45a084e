"""No framework: every task gets ranks, peers and ports."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.frameworks.base import TaskCommand, World, WorldMember
from stoker.frameworks.world import body, decided, with_ranks
from stoker.spec.job import Job
from stoker.spec.roles import WORKER


class Plain:
    name = "none"
    anchors: frozenset[str] = frozenset()

    def complete(self, job: Job) -> Job:
        return decided(job, 1)

    def ports(self, role: str) -> int:
        return 1

    def body(self, world: World, member: WorldMember, job: Job, argv: Sequence[str]) -> TaskCommand:
        env, each = with_ranks(world, member)
        if member.role == WORKER:
            env["JOB_COMPLETION_INDEX"] = str(member.index)  # the name in Kubernetes' Indexed Jobs
        return body(job, argv, env, each)


framework = Plain()
