"""Worlds for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stoker.frameworks.base import Framework, World, WorldMember
from stoker.spec import Job
from stoker.spec.roles import parts

Make = Callable[..., World]


@pytest.fixture
def world() -> Make:
    """`world(worker=2, ps=1)` on one machine, with ports from 7000 on. `processes` and `gpus` are those of
    each worker."""

    def make(*, processes: int = 1, gpus: int = 0, generation: int = 1, **roles: int) -> World:
        members: list[WorldMember] = []
        for role, count in roles.items():
            for index in range(count):
                base = 7000 + 10 * len(members)
                ports = (base, base + 1) if role == "scheduler" else (base,)
                members.append(
                    WorldMember(
                        f"{role}-{index}", role, index, "127.0.0.1", ports, processes=processes, gpus=gpus
                    )
                )
        return World("digits-7f3k", 1, generation, tuple(members), key="sesame")

    return make


@pytest.fixture
def bodies() -> Callable[..., dict[str, Any]]:
    """The commands of all members by task, each with the job and command of its role, as control calls it."""

    def make(framework: Framework, world: World, /, **job: Any) -> dict[str, Any]:
        whole = framework.complete(Job.from_json({"run": ["python", "train.py"], **job}))
        by_role = {part.role: part.job for part in parts(whole)}
        found = {}
        for member in world.members:
            seen = by_role.get(member.role, whole)
            found[member.task] = framework.body(world, member, seen, seen.argv())
        return found

    return make
