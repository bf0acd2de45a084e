"""torch and the libraries on it (Lightning, accelerate, Trainer): the environment of torchrun, without torchrun.

There are two kinds of scripts. Most expect one start per GPU, with RANK and the like set: Stoker starts them so.
Others start their processes themselves, with `torchrun` or `accelerate launch`: these run once per task, and PET_*
tells them how to join the same world. A script of unknown kind gets both, and both agree.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

from stoker.frameworks.base import TaskCommand, World, WorldMember
from stoker.frameworks.commands import calls_torchrun, is_python, words
from stoker.frameworks.world import body, decided, facts, first_rank, processes, trainers
from stoker.spec.job import Job

_ACCELERATE = re.compile(r"(?<![\w./-])((?:[\w./-]*/)?accelerate(?: +|-)launch)(?![\w.-])")
_OWN_PLACE = ("--num_machines", "--machine_rank", "--main_process_ip", "--main_process_port", "--config_file")
"""Options of `accelerate launch` by which users set its place themselves."""
PRELOAD = ("torch", "torch._dynamo")
"""Every DistributedDataParallel imports the second module, which takes nearly as long as the first."""


class Torch:
    name = "torch"
    anchors: frozenset[str] = frozenset()

    def complete(self, job: Job) -> Job:
        """One process per GPU. A shell script may itself start the processes, so it is started once."""
        argv = job.argv()
        known = starts_itself(argv) or any(is_python(word) for word in words(argv))
        return decided(job, max(1, job.resources.gpu) if known else 1)

    def ports(self, role: str) -> int:
        return 1

    def body(self, world: World, member: WorldMember, job: Job, argv: Sequence[str]) -> TaskCommand:
        env, each = facts(world, member)
        training = trainers(world)
        env["MASTER_ADDR"], env["MASTER_PORT"] = training[0].address, str(training[0].ports[0])
        if member not in training:
            return body(job, argv, env, each)
        env |= {
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RESTART_COUNT": str(max(0, world.generation - 1)),
            "PET_RDZV_BACKEND": "static",
            "PET_RDZV_ID": _run_id(world),
            "PET_MASTER_ADDR": env["MASTER_ADDR"],
            "PET_MASTER_PORT": env["MASTER_PORT"],
        }
        if _launches(argv, member):
            env |= _nodes(world, member, len(each))
            return body(job, _placed(argv, world, member), env, each if len(each) == 1 else ({},))
        env |= {"TORCHELASTIC_RUN_ID": _run_id(world)}
        ranks = _ranks(world, member)
        alone = len(each) == 1
        for one, rank in zip(each, ranks, strict=True):
            one |= rank
            one |= _nodes(world, member, max(1, member.gpus)) if alone else _as_node(rank)
        return replace(body(job, argv, env, each), preload=PRELOAD)


def starts_itself(argv: Sequence[str]) -> bool:
    """Whether the command starts several processes itself."""
    return calls_torchrun(argv) or _is_accelerate(argv)


def _launches(argv: Sequence[str], member: WorldMember) -> bool:
    """Whether it will start several processes. `accelerate launch` does so only for several GPUs; otherwise it
    becomes the one process, with the environment it finds."""
    return calls_torchrun(argv) or (_is_accelerate(argv) and member.gpus > 1)


def _is_accelerate(argv: Sequence[str]) -> bool:
    return _ACCELERATE.search(" ".join(words(argv))) is not None


def _run_id(world: World) -> str:
    return f"{world.run}-{world.attempt}-{world.generation}"


def _ranks(world: World, member: WorldMember) -> list[dict[str, str]]:
    """The variables that torchrun gives each process."""
    training = trainers(world)
    count, first = processes(world, member), first_rank(world, member)
    total = str(sum(processes(world, other) for other in training))
    same = tuple(other for other in training if other.role == member.role)
    role_first = sum(processes(world, other) for other in same[: same.index(member)])
    return [
        {
            "RANK": str(first + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": total,
            "LOCAL_WORLD_SIZE": str(count),
            "GROUP_RANK": str(training.index(member)),
            "GROUP_WORLD_SIZE": str(len(training)),
            "ROLE_NAME": member.role,
            "ROLE_RANK": str(role_first + local),
            "ROLE_WORLD_SIZE": str(sum(processes(world, other) for other in same)),
        }
        for local in range(count)
    ]


def _nodes(world: World, member: WorldMember, each: int) -> dict[str, str]:
    """For a torchrun of this task: the tasks are its nodes."""
    training = trainers(world)
    return {
        "PET_NNODES": str(len(training)),
        "PET_NODE_RANK": str(training.index(member)),
        "PET_NPROC_PER_NODE": str(each),
    }


def _as_node(rank: dict[str, str]) -> dict[str, str]:
    """For a torchrun within one of several processes: each process counts as a node, so that it too has one rank."""
    return {"PET_NNODES": rank["WORLD_SIZE"], "PET_NODE_RANK": rank["RANK"], "PET_NPROC_PER_NODE": "1"}


def _placed(argv: Sequence[str], world: World, member: WorldMember) -> list[str]:
    """`accelerate launch` reads its place among the machines only from its arguments."""
    found = words(argv)
    if not _is_accelerate(argv) or any(word.split("=")[0] in _OWN_PLACE for word in found):
        return list(argv)
    training = trainers(world)
    more = {
        "--num_machines": len(training),
        "--machine_rank": training.index(member),
        "--main_process_ip": training[0].address,
        "--main_process_port": training[0].ports[0],
    }
    if not any(word.split("=")[0] == "--num_processes" for word in found):
        more["--num_processes"] = sum(processes(world, other) for other in training)
    options = [part for name, value in more.items() for part in (name, str(value))]
    if found == list(argv):
        at = found.index("launch") if "launch" in found else 0
        return [*found[: at + 1], *options, *found[at + 1 :]]
    return [*argv[:2], _ACCELERATE.sub(lambda match: f"{match[0]} {shlex.join(options)}", argv[2], count=1)]


framework = Torch()
