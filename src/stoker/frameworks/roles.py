"""The groups of tasks of a job, with the roles that its framework adds. Pure."""

from __future__ import annotations

from stoker import frameworks
from stoker.spec import Job
from stoker.spec.roles import RoleTasks, parts


def parts_of(job: Job) -> tuple[RoleTasks, ...]:
    """In the order of their ranks."""
    return parts(frameworks.find(job.framework).complete(job))


def has_world(job: Job, found: tuple[RoleTasks, ...]) -> bool:
    """Whether its tasks are told about each other. A single process without a framework needs no world."""
    alone = len(found) == 1 and found[0].count == 1
    return not alone or job.framework is not None or (found[0].job.processes or 1) > 1


def is_anchor(job: Job, role: str) -> bool:
    """Whether the other tasks would not find a task of this role at another address."""
    return role in frameworks.find(job.framework).anchors


def ports(job: Job, role: str) -> int:
    """Number of ports that a task of this role needs."""
    return frameworks.find(job.framework).ports(role)
