"""Nodes and GPUs on which too much failed: noted, kept away from, and forgiven (see `scheduling.suspicion`).

What is noted lives as long as the server: one that was just started knows no ill of anybody.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace

from stoker.control.context import Context
from stoker.control.state import LiveRun, LiveTask
from stoker.scheduling import Aside, Failure, HealthTracker, NodeShape, Request, trusted
from stoker.spec.states import Cause

log = logging.getLogger(__name__)

_MACHINES = (Cause.LOST, Cause.GPU_FAULT)
"""Causes that may be the machine's."""


class NodeHealth:
    """Runs in the loop's thread."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._suspicion = HealthTracker()
        self._said: set[str] = set()

    def note(self, live: LiveRun, tasks: Iterable[LiveTask]) -> None:
        """What became of these tasks: a failure may be the machine's, and work that was done speaks for it."""
        assert live.attempt is not None
        before = self._suspicion.failures
        for task in tasks:
            node, gpus = task.place.node or "", task.place.gpus
            verdict = task.verdict
            if verdict is None or task.excused:
                continue
            if verdict.cause in _MACHINES:
                generation = f"{live.attempt.number}.{task.generation}"
                self._suspicion.failed(Failure(node, gpus, verdict.cause, live.id, generation, time.time()))
            elif verdict.cause is Cause.COMPLETED:
                self._suspicion.went_well(node, gpus)
        if self._suspicion.failures != before:
            self._ctx.wakeups.nodes_changed()

    def asides(self) -> tuple[Aside, ...]:
        """What is set aside now."""
        if not self._suspicion.failures:
            return ()
        known = self._ctx.scheduler.snapshot()
        requests = [*known.queued, *(held.request for held in known.held)]
        found = self._suspicion.aside(time.time(), self._ctx.fleet.shapes(), requests)
        for aside in found:
            if aside.name not in self._said:
                log.warning("%s is set aside: %s", aside.name, aside.reason)
        self._said = {aside.name for aside in found}
        return found

    def trusted(self) -> list[NodeShape]:
        shapes = self._ctx.fleet.shapes()
        asides = self.asides()
        return trusted(shapes, asides) if asides else shapes

    def wary(self, request: Request) -> Request:
        """The request, keeping away from where it failed itself and from the last resort of others."""
        if not self._suspicion.failures:
            return request
        spared = {aside.name for aside in self.asides() if aside.spared}
        return replace(request, avoid=self._suspicion.avoid(request.id, time.time()) | spared)
