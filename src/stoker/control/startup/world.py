"""Makes worlds: their members, addresses and ports, and what each member runs."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from stoker import frameworks
from stoker.control.startup import orders
from stoker.control.state import LiveRun, LiveTask
from stoker.errors import SpecError
from stoker.frameworks.base import TaskCommand, World, WorldMember
from stoker.frameworks.roles import ports
from stoker.frameworks.world import processes as world_processes
from stoker.settings import Home

HERE = "127.0.0.1"
"""Address of tasks on the server's machine."""
_STRIDE, _TURNS = 8, 256
"""How far the ports of a world move, and how often before they start again: below the ephemeral ports."""


def world(live: LiveRun, home: Home, first_port: int) -> World | None:
    """The world of the attempt's newest generation; None: a member has no address yet.

    `first_port`: of tasks that have their own address; 0: ports were allocated when tasks were placed. After a member
    was given up without proof the ports move, so that it cannot connect to the new world."""
    assert live.attempt is not None
    members = []
    for task in live.tasks.values():
        if task.joining:
            continue
        address = task.seen.address if task.seen is not None and task.seen.address else ""
        given = task.place.ports
        if first_port:
            first = first_port + task.place.moved % _TURNS * _STRIDE
            given = tuple(range(first, first + ports(live.job, task.part.role)))
        elif not address:
            address = HERE
        if not address:
            return None
        members.append(
            WorldMember(
                task=task.name,
                role=task.part.role,
                index=task.index,
                address=address,
                ports=given,
                processes=task.part.job.processes or 1,
                gpus=len(task.place.gpus) or task.part.job.resources.gpu,
                node=task.place.node or "",
            )
        )
    return World(
        run=live.id,
        attempt=live.attempt.number,
        generation=live.attempt.generation,
        members=tuple(members),
        key=_key(home, live.row.key, live.attempt.number, live.attempt.generation),
    )


def body(live: LiveRun, task: LiveTask, found: World | None) -> TaskCommand:
    """What the task runs. Without a world it runs its command unchanged."""
    argv = orders.command(live.row, task.part)
    if found is None:
        return TaskCommand(tuple(argv))
    member = next(member for member in found.members if member.task == task.name)
    made = frameworks.find(live.job.framework).body(found, member, task.part.job, argv)
    if not made.argv and argv:
        raise SpecError(f"the framework {live.job.framework} left {task.name} without a command")
    return made


def processes(task: LiveTask, found: World | None) -> int:
    """The number of training processes in the task, started by Stoker or by its command."""
    if found is None:
        return task.part.job.processes or 1
    return world_processes(found, next(member for member in found.members if member.task == task.name))


def _key(home: Home, *parts: object) -> str:
    """A key that is the same for all members of a generation, and cannot be guessed."""
    basis = "/".join(str(part) for part in (_secret(home.engine / "world-key"), *parts))
    return hashlib.sha256(basis.encode()).hexdigest()


def _secret(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    made.touch(0o600)
    made.write_text(secrets.token_hex(32) + "\n")
    try:
        path.hardlink_to(made)
    except FileExistsError:
        pass  # another thread or process was first: its secret counts
    finally:
        made.unlink()
    return path.read_text().strip()
