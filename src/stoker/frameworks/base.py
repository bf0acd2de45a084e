"""The contract of a framework: given the world, each task's command and environment. Pure.

A framework knows nothing of engines, servers or files: the same world gives the same bodies on one machine and in
pods. What must run beside the training (a launcher's remote shell, several processes in one task) is a helper that
the task's own launcher provides; see `TaskCommand.argv`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stoker.spec.job import Job

HELPER = "{helper}"
"""As argv[0]: the rest is the name of a helper (`stoker.launcher.helpers`) and its arguments. The launcher replaces it
by its own interpreter and the path of that helper."""


@dataclass(frozen=True)
class WorldMember:
    task: str
    """`worker-0`"""
    role: str
    index: int
    """Index within its role."""
    address: str
    """An IP address at which the other tasks reach it."""
    ports: tuple[int, ...]
    """Its own ports, as many as `Framework.ports` requires. On one machine no two tasks share a port."""
    processes: int = 1
    gpus: int = 0
    node: str = ""


@dataclass(frozen=True)
class World:
    """The members in the order of their ranks: the chief, the workers, then the others. Immutable: a change of
    members makes another world."""

    run: str
    attempt: int
    generation: int
    members: tuple[WorldMember, ...]
    key: str = field(default="", repr=False)
    """A secret that only the members of this generation share."""

    def role(self, name: str) -> tuple[WorldMember, ...]:
        return tuple(member for member in self.members if member.role == name)


@dataclass(frozen=True)
class TaskCommand:
    argv: tuple[str, ...]
    """Empty: the image's own command."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the job's variables. Frameworks never replace what the job's `env` sets."""
    each: tuple[Mapping[str, str], ...] = ()
    """For several processes in one task: what each one has beyond `env`. Empty: one process."""
    preload: tuple[str, ...] = ()
    """Modules that its processes always import first, that take long, and that no variable of the world changes. A
    process that has imported them may wait to become the next one. Empty: there are none."""


class Framework(Protocol):
    """One framework. Stateless; every method is pure and may be called from any thread."""

    name: str
    anchors: frozenset[str]
    """Roles that the other tasks keep looking for at the address they got at the start. When such a task comes back at
    another address it is not found, so all tasks start again."""

    def complete(self, job: Job) -> Job:
        """The job with the roles that this framework adds (a launcher, a scheduler), and with `processes` decided.
        Completing twice changes nothing. Raises SpecError for an impossible job."""
        ...

    def ports(self, role: str) -> int:
        """Number of ports that a task of this role needs."""
        ...

    def body(self, world: World, member: WorldMember, job: Job, argv: Sequence[str]) -> TaskCommand:
        """`job`: as the member's role sees it (`spec.parts`). `argv`: its command."""
        ...
