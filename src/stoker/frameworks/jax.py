"""JAX: the coordinator's address and each process's number.

`jax.distributed.initialize` itself reads only the coordinator's address; `stoker.jax_initialize()` passes it the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.frameworks.base import TaskCommand, World, WorldMember
from stoker.frameworks.world import body, decided, endpoint, processes, trainers, with_ranks
from stoker.spec.job import Job


class Jax:
    name = "jax"
    anchors: frozenset[str] = frozenset()

    def complete(self, job: Job) -> Job:
        return decided(job, 1)

    def ports(self, role: str) -> int:
        return 1

    def body(self, world: World, member: WorldMember, job: Job, argv: Sequence[str]) -> TaskCommand:
        env, each = with_ranks(world, member)
        training = trainers(world)
        if member not in training:
            return body(job, argv, env, each)
        env["JAX_COORDINATOR_ADDRESS"] = endpoint(training[0])
        env["JAX_NUM_PROCESSES"] = str(sum(processes(world, other) for other in training))
        shared = _shares(member.gpus, len(each))
        for local, one in enumerate(each):
            one["JAX_PROCESS_ID"] = one["STOKER_RANK"]
            if shared:
                one["JAX_LOCAL_DEVICE_IDS"] = shared[local]
        return body(job, argv, env, each)


def _shares(gpus: int, count: int) -> list[str]:
    """The GPUs of each process, where several processes have at least one GPU each."""
    if count == 1 or gpus < count:
        return []
    size = gpus // count
    return [",".join(str(at) for at in range(one * size, (one + 1) * size)) for one in range(count)]


framework = Jax()
