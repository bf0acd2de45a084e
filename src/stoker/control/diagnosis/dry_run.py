"""What a submit would start, for `--dry-run`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker import frameworks
from stoker.frameworks.base import HELPER, World, WorldMember
from stoker.frameworks.roles import has_world
from stoker.scheduling import Ask
from stoker.spec import Job
from stoker.spec.roles import RoleTasks


def tasks(job: Job, parts: Sequence[RoleTasks], asks: Mapping[str, Ask]) -> list[dict[str, Any]]:
    """Every task, in the order of the ranks. `asks`: the resources that each requests."""
    commands = _commands(job, parts)
    return [
        {
            "name": name,
            "role": part.role,
            "cpu": asks[name].cpu,
            "memory": asks[name].memory,
            "gpu": asks[name].gpu,
            "processes": part.job.processes or 1,
            "command": commands[name],
            "on_loss": part.on_loss,
            "ends": part.ends,
            "optional": index >= part.least,
        }
        for part in parts
        for index, name in enumerate(part.names)
        if name in asks
    ]


def _commands(job: Job, parts: Sequence[RoleTasks]) -> dict[str, list[str]]:
    """The command of each task, as its framework builds it. Addresses are not known yet: task names and port 0 stand in
    for them."""
    if not has_world(job, tuple(parts)):
        return {name: part.job.argv() for part in parts for name in part.names}
    framework = frameworks.find(job.framework)
    members = [
        (
            part,
            WorldMember(
                name, part.role, index, name, (0,) * framework.ports(part.role), part.job.processes or 1
            ),
        )
        for part in parts
        for index, name in enumerate(part.names)
    ]
    world = World(job.name, 1, 1, tuple(member for _, member in members))
    bodies = {
        member.task: framework.body(world, member, part.job, part.job.argv()) for part, member in members
    }
    return {name: [word for word in body.argv if word != HELPER] for name, body in bodies.items()}


def notes(job: Job, parts: Sequence[RoleTasks]) -> list[str]:
    """Facts that may surprise the user."""
    found = []
    several = sum(part.count for part in parts) > 1
    if any(part.job.resources.cpu is None for part in parts):
        found.append(
            "no cpu asked for: the tasks share this machine's CPUs"
            if several
            else "no cpu asked for: holds one CPU's place, may use more when the machine is idle"
        )
    if any(part.job.resources.memory is None for part in parts):
        found.append("no memory asked for: not limited")
    elastic = next((part for part in parts if part.least < part.count), None)
    if elastic is not None:
        found.append(
            f"starts with as many workers as there is room for, from {elastic.least} to {elastic.count}"
        )
    if several and job.framework is None:
        found.append(
            "no framework named: each task gets its rank and the others' addresses, and sets up the rest itself"
        )
    return found
