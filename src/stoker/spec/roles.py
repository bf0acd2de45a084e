"""The parts of a job: its groups of equal tasks, each with everything needed to start it.

A job's own keys describe its workers; `roles` describes the other groups. A part is one group with every key filled
in, so that no other module decides where a command or a limit comes from.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.spec.job import Job, Role

WORKER = "worker"
FIRST = ("chief", "master")
"""Roles before the workers: they have rank 0."""
_LEADS = ("launcher", "client")
"""Roles whose end is the end of the run, whatever else still runs."""
_SERVES = ("ps", "evaluator", "scheduler")
"""Roles that serve the others until these are done. They are replaced alone."""


@dataclass(frozen=True)
class RoleTasks:
    role: str
    count: int
    """The largest number of tasks."""
    least: int
    """The smallest number: less than `count` only for elastic workers."""
    job: Job
    """The job as this role sees it: with its own command, resources, environment and image; without roles."""
    on_loss: str
    ends: bool
    """The run is over when all tasks of all such parts are done."""
    may_fail: bool

    @property
    def names(self) -> list[str]:
        return [f"{self.role}-{index}" for index in range(self.count)]


def parts(job: Job) -> tuple[RoleTasks, ...]:
    """In the order of their ranks: the chief, the workers, then the others in the order of the file."""
    ahead = [name for name in job.roles if name in FIRST]
    after = [name for name in job.roles if name not in FIRST]
    ending = _ending(job)
    found = [_role(job, name, job.roles[name], ending) for name in ahead]
    if job.workers.max:
        found.append(
            RoleTasks(
                role=WORKER,
                count=job.workers.max,
                least=job.workers.min,
                job=job.model_copy(update={"roles": {}}),
                on_loss=job.on_loss,
                ends=WORKER in ending,
                may_fail=False,
            )
        )
    return tuple(found + [_role(job, name, job.roles[name], ending) for name in after])


def _role(job: Job, name: str, role: Role, ending: set[str]) -> RoleTasks:
    seen = job.model_copy(
        update={
            "roles": {},
            "run": role.run if role.run is not None else (None if role.image or role.args else job.run),
            "args": role.args or (() if role.run is not None or role.image else job.args),
            "resources": role.resources,
            "env": {**job.env, **role.env},
            "image": role.image or job.image,
            "pod": role.pod if role.pod is not None else job.pod,
        }
    )
    return RoleTasks(
        role=name,
        count=role.count,
        least=role.count,
        job=seen,
        on_loss=role.on_loss or ("task" if name in _SERVES else "world"),
        ends=name in ending,
        may_fail=role.may_fail,
    )


def _ending(job: Job) -> set[str]:
    """Roles whose tasks end the run: those with `ends`, else the leading role, else all that train."""
    explicit = {name for name, role in job.roles.items() if role.ends}
    if explicit:
        return explicit
    leads = {name for name in job.roles if name in _LEADS}
    if not leads and job.framework == "tensorflow":
        leads = {name for name in job.roles if name in FIRST}
    if leads:
        return leads
    silent = {name for name, role in job.roles.items() if role.ends is False}
    trains = {name for name in job.roles if name not in _SERVES} - silent
    return trains | ({WORKER} if job.workers.max else set()) or set(job.roles)
