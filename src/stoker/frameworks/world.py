"""The variables that every framework sets for a world, and common questions about it.

Ranks count processes: first those of the training tasks, in the order of the members, then one for each other task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from stoker.errors import SpecError
from stoker.frameworks.base import TaskCommand, World, WorldMember
from stoker.spec.job import Job
from stoker.spec.roles import FIRST, WORKER

TRAIN = (*FIRST, WORKER)
"""Roles that train. Other roles (ps, evaluator, a user's own) serve them."""


def trainers(world: World) -> tuple[WorldMember, ...]:
    """Members whose processes have ranks in the training; all members of a world without such roles."""
    return tuple(member for member in world.members if member.role in TRAIN) or world.members


def processes(world: World, member: WorldMember) -> int:
    """Number of processes of a member. A task that does not train runs one, whatever `processes` says."""
    return max(1, member.processes) if member in trainers(world) else 1


def first_rank(world: World, member: WorldMember) -> int:
    """The rank of its first process in the world."""
    before = world.members[: world.members.index(member)]
    return sum(processes(world, other) for other in before)


def endpoint(member: WorldMember, port: int = 0) -> str:
    """`host:port`; `port`: index of the member's port."""
    host = f"[{member.address}]" if ":" in member.address else member.address
    return f"{host}:{member.ports[port]}"


def facts(world: World, member: WorldMember) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Variables common to all frameworks: of the task, and of each of its processes."""
    count = processes(world, member)
    task = {
        "STOKER_WORLD_SIZE": str(sum(processes(world, other) for other in world.members)),
        "STOKER_LOCAL_WORLD_SIZE": str(count),
        "STOKER_PEERS": peers(world.members),
        "STOKER_PORT": str(member.ports[0]),
    }
    for role in dict.fromkeys(other.role for other in world.members):
        task[f"STOKER_PEERS_{variable(role)}"] = peers(world.role(role))
    first = first_rank(world, member)
    each = [{"STOKER_RANK": str(first + local), "STOKER_LOCAL_RANK": str(local)} for local in range(count)]
    return task, each


def ranks(world: World, member: WorldMember) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The variables by which torch and many libraries find their world: of the task, and of each of its processes. Tasks
    that do not train only find rank 0."""
    training, count = trainers(world), processes(world, member)
    task = {"MASTER_ADDR": training[0].address, "MASTER_PORT": str(training[0].ports[0])}
    if member not in training:
        return task, [{} for _ in range(count)]
    task["WORLD_SIZE"] = str(sum(processes(world, other) for other in training))
    task["LOCAL_WORLD_SIZE"] = str(count)
    first = first_rank(world, member)
    return task, [{"RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(count)]


def with_ranks(world: World, member: WorldMember) -> tuple[dict[str, str], list[dict[str, str]]]:
    """`facts` and `ranks`: for frameworks whose processes Stoker starts, one per rank."""
    (task, each), (more, ranked) = facts(world, member), ranks(world, member)
    return {**task, **more}, [{**one, **rank} for one, rank in zip(each, ranked, strict=True)]


def peers(members: Iterable[WorldMember]) -> str:
    return ",".join(endpoint(member) for member in members)


def variable(name: str) -> str:
    return name.upper().replace("-", "_").replace(".", "_")


def body(
    job: Job, argv: Sequence[str], env: Mapping[str, str], each: Sequence[Mapping[str, str]] = ({},)
) -> TaskCommand:
    """Variables that the job's own `env` names are the user's and stay. A single process needs no part of its own."""
    if len(each) == 1:
        env, each = {**env, **each[0]}, ()
    return TaskCommand(
        argv=tuple(argv), env=_without(env, job.env), each=tuple(_without(one, job.env) for one in each)
    )


def decided(job: Job, processes: int) -> Job:
    """With this number of processes, where the job sets none."""
    return job if job.processes is not None else job.model_copy(update={"processes": processes})


def only_one(job: Job, why: str) -> Job:
    if (job.processes or 1) > 1:
        raise SpecError(
            f"processes: {job.processes} does not go with framework {job.framework}: {why}",
            hint="Leave `processes` out, and set more `workers`.",
        )
    return decided(job, 1)


def _without(env: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}
