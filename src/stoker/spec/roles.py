"""The parts of a job: its groups of equal tasks, each with all it needs to be started.

A job's own keys describe its workers; `roles` describes what stands beside them. A part is one of these groups
with everything filled in, so that nobody else asks where a command or a limit comes from.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.spec.job import Job, Role

WORKER = "worker"
FIRST = ("chief", "master")
"""Roles that come before the workers: rank 0 is theirs."""
_LEADS = ("launcher", "client")
"""Roles whose end is the end of the run, whoever else still runs."""
_SERVES = ("ps", "evaluator", "scheduler")
"""Roles that serve the others until these are done, and come back alone."""


@dataclass(frozen=True)
class RoleTasks:
    """A role and its tasks."""

    role: str
    count: int
    """As many as there are at most."""
    least: int
    """As few as it can do with: less than `count` only for elastic workers."""
    job: Job
    """The job as this role sees it: its own command, resources, environment and image; no roles."""
    on_loss: str
    ends: bool
    """The run is over when all tasks of all such parts are."""
    may_fail: bool

    @property
    def names(self) -> list[str]:
        return [f"{self.role}-{index}" for index in range(self.count)]


def parts(job: Job) -> tuple[RoleTasks, ...]:
    """In the order of their ranks: the chief, the workers, then the others as they stand in the file."""
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
    """Who must be done for the run to be: those who say so, else the one that leads, else all that train."""
    said = {name for name, role in job.roles.items() if role.ends}
    if said:
        return said
    leads = {name for name in job.roles if name in _LEADS}
    if not leads and job.framework == "tensorflow":
        leads = {name for name in job.roles if name in FIRST}
    if leads:
        return leads
    silent = {name for name, role in job.roles.items() if role.ends is False}
    trains = {name for name in job.roles if name not in _SERVES} - silent
    return trains | ({WORKER} if job.workers.max else set()) or set(job.roles)
