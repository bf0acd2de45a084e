"""A task directory behind a courier."""

from __future__ import annotations

import asyncio

from stoker.engine.kubernetes.far.courier import Courier
from stoker.engine.kubernetes.far.mirror import Mirror


class FarDirectory:
    """Implements stoker.task.access.FarTaskDir. One per task and server: keep it, do not make it anew per call.

    Reading is from the mirror and may be done anywhere; everything else blocks and is called from worker threads,
    never from the loop's.
    """

    def __init__(self, courier: Courier, mirror: Mirror, loop: asyncio.AbstractEventLoop) -> None:
        raise NotImplementedError

    def exists(self) -> bool:
        """What is read here can be relied on: the mirror has been up to date since this object was made, or it
        knows the order that was given. False while the courier has not answered yet."""
        raise NotImplementedError
