"""MPI without ssh: one more task runs mpirun, and the launchers of the workers are its remote shell.

mpirun starts its daemons on other hosts through an agent: a program that it calls with a host's name and a command.
Stoker's agent (`stoker.launcher.helpers`) connects to the worker of that name and authenticates with the world's key.
The worker's launcher runs the command there, in the worker's own environment. So an image needs only an MPI: no sshd,
no keys, no root.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.errors import SpecError
from stoker.frameworks.base import HELPER, TaskCommand, World, WorldMember
from stoker.frameworks.world import body, decided, endpoint, facts, trainers
from stoker.spec.job import Job, Role

LAUNCHER = "launcher"


class Mpi:
    name = "mpi"
    anchors: frozenset[str] = frozenset()
    helper = "mpirun"
    """The helper that runs the job's command over all workers."""

    def complete(self, job: Job) -> Job:
        role = job.roles.get(LAUNCHER) or Role()
        if job.run is None and role.run is None:
            raise SpecError(
                f"framework {self.name} needs a command to run over the workers",
                hint="Add a line like `run: python train.py`; the image's own command is not known.",
            )
        if role.count != 1:
            raise SpecError(
                f"roles.launcher.count: {role.count} launchers would start the training {role.count} times",
                hint="Leave `count` out.",
            )
        job = job.model_copy(update={"roles": {**job.roles, LAUNCHER: role}})
        return decided(job, max(1, job.resources.gpu))

    def ports(self, role: str) -> int:
        return 1

    def body(self, world: World, member: WorldMember, job: Job, argv: Sequence[str]) -> TaskCommand:
        env, _ = facts(world, member)
        env["STOKER_WORLD_KEY"] = world.key
        hosts = trainers(world)
        if member.role == LAUNCHER:
            env["STOKER_MPI_HOSTS"] = ",".join(
                f"{host.task}={endpoint(host)}*{max(1, host.processes)}" for host in hosts
            )
            env["STOKER_MPI_GRACE"] = f"{job.grace:g}"
            return body(job, (HELPER, self.helper, *argv), env)
        if member in hosts:
            return body(job, (HELPER, "remote-shell", member.address, str(member.ports[0])), env)
        del env["STOKER_WORLD_KEY"]
        return body(job, argv, env)


framework = Mpi()
