"""Cleanup of ended attempts: releases launchers, deletes secrets, and removes what the engine holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta

from stoker.control.context import Context
from stoker.control.placement import places
from stoker.control.policy import hold
from stoker.control.startup import orders, salvage
from stoker.engine.base import Observation, SetsAside
from stoker.errors import NotFound, StokerError, StoreError
from stoker.store.rows import AttemptRow, UpdateAttempt
from stoker.task.directory import TaskDir
from stoker.task.layout import SharedPart

log = logging.getLogger(__name__)

_CLEAN_AGAIN = 10.0
"""Seconds until an attempt that the engine still shows is cleaned up again. A pod on a lost node stays for long."""


class Cleanup:
    """Runs in the loop's thread. Everything may be repeated. A failed cleanup is retried when the engine shows a task."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._cleaning: set[tuple[str, int]] = set()
        self._unknown: set[tuple[str, int]] = set()

    def begin_session(self) -> None:
        self._cleaning.clear()

    def begin(self, attempt: AttemptRow) -> None:
        """Remove what the engine still holds of an ended attempt, in the background."""
        if (attempt.run, attempt.number) not in self._cleaning:
            self._cleaning.add((attempt.run, attempt.number))
            self._ctx.wakeups.spawn(self._clean(attempt))

    async def _clean(self, attempt: AttemptRow) -> None:
        """Release the launchers and delete what the engine holds. Checkpoints and outputs were transferred before."""
        handle = attempt.handle or {"run": attempt.run, "attempt": attempt.number}
        files = hold.files_of(attempt)
        try:
            engine = self._ctx.fleet.engine(attempt.engine)
            for task, place in attempt.placement.items():
                directory = await engine.reach(handle, task)
                if directory.exists():
                    newest = place.incarnation
                    parts = [
                        SharedPart(attempt.run, attempt.number, task, number + 1) for number in range(newest)
                    ]
                    await asyncio.to_thread(self._release, directory, [] if files else parts)
            await engine.stop(handle, grace=timedelta(seconds=2))
            if files and isinstance(engine, SetsAside):
                await engine.set_aside(handle)
            else:
                await engine.remove(handle)
            await self._ctx.committer.commit([UpdateAttempt(attempt.run, attempt.number, {"removed": True})])
            self._ctx.ports.give(places.ports_of(attempt))
            self._ctx.scheduler.release(hold.name(attempt))
            self._ctx.wakeups.schedule_soon()
        except StoreError:
            raise
        except (StokerError, OSError) as exc:
            log.warning("attempt %s of %s is not cleaned up yet: %s", attempt.number, attempt.run, exc)
        finally:
            asyncio.get_running_loop().call_later(
                _CLEAN_AGAIN, self._cleaning.discard, (attempt.run, attempt.number)
            )

    def _release(self, directory: TaskDir, parts: Sequence[SharedPart]) -> None:
        """Have the launcher end by itself; if the order cannot be written, the engine ends it. `parts`: the parts of all
        incarnations of the task on a shared volume."""
        try:
            order = directory.order()
            directory.forget_secrets()
            if order is None or order.verb != "release":
                for part in parts:
                    salvage.remove(directory, part)
            if order is not None and order.verb != "release":
                directory.write_order(orders.release_order(seq=order.seq + 1, generation=order.generation))
        except OSError as exc:
            log.info("%s: cannot be released: %s", directory.root, exc)

    def is_unknown(self, observation: Observation) -> bool:
        """For a task of no live attempt: whether the database does not know its attempt. A known attempt that has ended
        is cleaned up."""
        key = (observation.run, observation.attempt)
        if key in self._cleaning:
            return False
        if key in self._unknown:
            return True
        try:
            attempt = self._ctx.store.attempt(*key)
        except NotFound:
            self._unknown.add(key)
            return True
        if attempt.state == "ended" and not hold.is_kept(attempt):
            self.begin(attempt)
        return False
