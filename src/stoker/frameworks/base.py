"""What a framework is to us: given the world, each task's command and environment. Pure.

A framework knows nothing of engines, servers or files: the same world gives the same bodies on one machine and in
pods. What must run beside the training (a launcher's remote shell, several processes in one task) is a helper that
the task's own launcher brings; see `TaskCommand.argv`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stoker.spec.job import Job

HELPER = "{helper}"
"""As argv[0]: the rest is the name of a helper (`stoker.launcher.helpers`) and its arguments; the launcher puts its own
interpreter and the way to that helper here."""


@dataclass(frozen=True)
class WorldMember:
    """One task of a world."""

    task: str
    """`worker-0`"""
    role: str
    index: int
    """Within its role."""
    address: str
    """An IP address at which the others reach it."""
    ports: tuple[int, ...]
    """Its own, as many as `Framework.ports` asked for; on one machine no two tasks have one in common."""
    processes: int = 1
    gpus: int = 0
    node: str = ""


@dataclass(frozen=True)
class World:
    """Who is there, in the order of the ranks: the chief, the workers, then the others. Immutable: when anybody comes
    or goes there is another one."""

    run: str
    attempt: int
    generation: int
    members: tuple[WorldMember, ...]
    key: str = field(default="", repr=False)
    """A secret that the members of this generation share, and nobody else."""

    def role(self, name: str) -> tuple[WorldMember, ...]:
        return tuple(member for member in self.members if member.role == name)


@dataclass(frozen=True)
class TaskCommand:
    """What one task runs."""

    argv: tuple[str, ...]
    """Empty: the image's own command."""
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of the job's; what a job's `env` says itself is left alone by the frameworks."""
    each: tuple[Mapping[str, str], ...] = ()
    """For several processes in one task: what each has on top of `env`. Empty: one process."""
    preload: tuple[str, ...] = ()
    """Modules that its processes import first in any case, that take long, and that no variable which the world sets
    changes: a process that has imported these may wait to be the next one. Empty: there are none."""


class Framework(Protocol):
    """One of them. Stateless; every method is pure and may be called from any thread."""

    name: str
    anchors: frozenset[str]
    """Roles that the others go on looking for at the address they were told when they began. One of these that comes back
    at another address is not found: all begin again."""

    def complete(self, job: Job) -> Job:
        """The job with the roles that this framework adds to what people write (a launcher, a scheduler), and with
        `processes` decided. Completing twice changes nothing. Raises SpecError for what cannot be."""
        ...

    def ports(self, role: str) -> int:
        """How many ports a task of this role needs."""
        ...

    def body(self, world: World, member: WorldMember, job: Job, argv: Sequence[str]) -> TaskCommand:
        """`job`: as the member's role sees it (`spec.parts`). `argv`: its command."""
        ...
