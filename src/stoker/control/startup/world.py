"""Making worlds: who is in one, with which addresses and ports, and what each member runs."""

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
from stoker.settings import Home

HERE = "127.0.0.1"
"""Where tasks that share the server's machine reach each other."""
_STRIDE, _TURNS = 8, 256
"""How far the ports of a world move, and how often before they begin anew: below the ports that systems hand out."""


def world(live: LiveRun, home: Home, first_port: int) -> World | None:
    """The world of the attempt's newest generation; None while a member has no address. `first_port`: where each task
    has an address of its own; 0: its ports were given to it when it was placed. Where somebody of the world before may
    still live, unproven, nobody listens where he would knock."""
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
    """What the task runs. Without a world: a single task runs its command as it is."""
    argv = orders.command(live.row, task.part)
    if found is None:
        return TaskCommand(tuple(argv))
    member = next(member for member in found.members if member.task == task.name)
    made = frameworks.find(live.job.framework).body(found, member, task.part.job, argv)
    if not made.argv and argv:
        raise SpecError(f"the framework {live.job.framework} left {task.name} without a command")
    return made


def _key(home: Home, *parts: object) -> str:
    """The same for everybody who asks about one generation, and not to be guessed."""
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
        pass  # of two who come together the first one's counts for both
    finally:
        made.unlink()
    return path.read_text().strip()
