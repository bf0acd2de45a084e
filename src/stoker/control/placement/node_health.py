"""Nodes and GPUs on which too many tasks failed: set aside for a while (see `scheduling.node_health`).

The failures are kept in memory only: after a start of the server all nodes are trusted.
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
"""Causes that may be the fault of the node."""


class NodeHealth:
    """Runs in the loop's thread."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._tracker = HealthTracker()
        self._logged: set[str] = set()

    def note(self, live: LiveRun, tasks: Iterable[LiveTask]) -> None:
        """Note the verdicts of these tasks: failures that may be the node's, and tasks that completed."""
        assert live.attempt is not None
        before = self._tracker.failures
        for task in tasks:
            node, gpus = task.place.node or "", task.place.gpus
            verdict = task.verdict
            if verdict is None or task.excused:
                continue
            if verdict.cause in _MACHINES:
                generation = f"{live.attempt.number}.{task.generation}"
                self._tracker.failed(Failure(node, gpus, verdict.cause, live.id, generation, time.time()))
            elif verdict.cause is Cause.COMPLETED:
                self._tracker.went_well(node, gpus)
        if self._tracker.failures != before:
            self._ctx.wakeups.nodes_changed()

    def asides(self) -> tuple[Aside, ...]:
        """Nodes and GPUs that are set aside now."""
        if not self._tracker.failures:
            return ()
        known = self._ctx.scheduler.snapshot()
        requests = [*known.queued, *(held.request for held in known.held)]
        found = self._tracker.aside(time.time(), self._ctx.fleet.shapes(), requests)
        for aside in found:
            if aside.name not in self._logged:
                log.warning("%s is set aside: %s", aside.name, aside.reason)
        self._logged = {aside.name for aside in found}
        return found

    def trusted(self) -> list[NodeShape]:
        shapes = self._ctx.fleet.shapes()
        asides = self.asides()
        return trusted(shapes, asides) if asides else shapes

    def wary(self, request: Request) -> Request:
        """The request, avoiding where the run failed itself, and suspects that are only spared for other requests."""
        if not self._tracker.failures:
            return request
        spared = {aside.name for aside in self.asides() if aside.spared}
        return replace(request, avoid=self._tracker.avoid(request.id, time.time()) | spared)
