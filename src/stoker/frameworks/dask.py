"""Dask: a scheduler, the workers, and the job's script as their client."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.errors import SpecError
from stoker.frameworks.base import TaskCommand, World, WorldMember
from stoker.frameworks.commands import is_python, words
from stoker.frameworks.world import body, decided, endpoint, facts
from stoker.spec.job import Job, Role

SCHEDULER, CLIENT = "scheduler", "client"
_NEVER_DONE = 'while :; do "$@" || exit; sleep 0.2; done'
"""A worker whose scheduler is gone ends as if its work were done. It starts again: the next scheduler is at the same
address, or the worker times out and gets another address."""
_DEATH_TIMEOUT = "60"


class Dask:
    name = "dask"
    anchors: frozenset[str] = frozenset()

    def complete(self, job: Job) -> Job:
        if job.run is None and CLIENT not in job.roles:
            raise SpecError(
                "framework dask needs a command to run as the client",
                hint="Add a line like `run: python prepare.py`; the image's own command is not known.",
            )
        for name in (SCHEDULER, CLIENT):
            if name in job.roles and job.roles[name].count != 1:
                raise SpecError(f"roles.{name}.count: dask has one {name}", hint="Leave `count` out.")
        # The scheduler's state is lost with it, so the client starts again. Workers may come and go.
        roles = {SCHEDULER: Role(), CLIENT: Role(), **job.roles}
        if roles[SCHEDULER].on_loss is None:
            roles[SCHEDULER] = roles[SCHEDULER].model_copy(update={"on_loss": "world"})
        return decided(job.model_copy(update={"roles": roles, "on_loss": "task"}), 1)

    def ports(self, role: str) -> int:
        return 2 if role == SCHEDULER else 1

    def body(self, world: World, member: WorldMember, job: Job, argv: Sequence[str]) -> TaskCommand:
        env, each = facts(world, member)
        schedulers = world.role(SCHEDULER)
        if not schedulers:
            return body(job, argv, env, each)
        scheduler = schedulers[0]
        address = f"tcp://{endpoint(scheduler)}"
        env["DASK_SCHEDULER_ADDRESS"] = address
        if member.role == SCHEDULER:
            return body(job, _scheduler(scheduler, argv), env, each)
        if member.role == "worker":
            return body(job, _worker(address, member, job, argv, len(each)), env, each)
        return body(job, argv, env, each)


def _scheduler(member: WorldMember, argv: Sequence[str]) -> list[str]:
    port, dashboard = member.ports
    place = [
        "--host",
        member.address,
        "--port",
        str(port),
        "--dashboard-address",
        f"{member.address}:{dashboard}",
    ]
    return [*_dask(argv), "scheduler", *place]


def _worker(address: str, member: WorldMember, job: Job, argv: Sequence[str], count: int) -> list[str]:
    """Without a nanny: Stoker itself restarts and reports a worker that ends."""
    options = ["--no-nanny", "--no-dashboard", "--death-timeout", _DEATH_TIMEOUT, "--host", member.address]
    if count == 1:
        options += ["--name", member.task, "--worker-port", str(member.ports[0])]
    if job.resources.cpu is not None:
        options += ["--nthreads", str(max(1, int(job.resources.cpu // count)))]
    if job.resources.memory is not None:
        options += ["--memory-limit", str(job.resources.memory // count)]
    return ["/bin/sh", "-c", _NEVER_DONE, "dask-worker", *_dask(argv), "worker", address, *options]


def _dask(argv: Sequence[str]) -> list[str]:
    """The dask command of the script's Python, where that is named: that Python certainly has dask."""
    python = next((word for word in words(argv) if is_python(word)), None)
    return [python, "-m", "dask"] if python else ["dask"]


framework = Dask()
