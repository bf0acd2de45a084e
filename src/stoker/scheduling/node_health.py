"""Which nodes and GPUs are avoided for a while, because too much failed on them.

The input is failures with their time; the output is what is set aside now, and why. Nothing here reads a clock.

- A GPU is suspected after several faults of it (`gpu-fault`), whichever run used it. When a fault does not name the
  GPU of a task, all of the task's GPUs are recorded: only the broken one is recorded again and again.
- A node is suspected after several losses on it (`lost`, `engine-error`) by at least two runs: a single run may bring
  down every machine it uses. That run itself avoids the node (`avoid`).
- Failures count once per generation of a run: a gang that loses eight tasks with one machine lost it once.
- Successful work, time, or an administrator clears all failures there.
- A suspect is set aside only while every present request could start without it. The last node or GPU that fits is
  spared: it is used only where nothing else is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from stoker.scheduling.feasibility import ever_fits
from stoker.scheduling.model import NodeShape, Request, gpu_name

GPU_CAUSES = frozenset({"gpu-fault"})
NODE_CAUSES = frozenset({"lost", "engine-error"})


@dataclass(frozen=True)
class HealthRules:
    failures: int = 3
    """Number of failures within the window that make a suspect."""
    window: float = 3600.0
    """Seconds. Failures further apart count as chance."""
    runs: int = 2
    """Number of different runs that must have failed on a node."""
    own: int = 2
    """A run avoids a node or GPU after this many failures of its own."""
    forgiven_after: float = 6 * 3600.0
    """Seconds after the last failure. So a repaired machine comes back by itself."""


@dataclass(frozen=True)
class Failure:
    """A task that ended for a cause that may be the machine's."""

    node: str
    gpus: tuple[str, ...]
    """GPUs of this task."""
    cause: str
    run: str
    generation: str
    """Failures of one generation of a run count once."""
    at: float


@dataclass(frozen=True)
class Aside:
    """A node or a GPU that is set aside."""

    node: str
    gpu: str | None
    """None: the whole node."""
    reason: str
    """`3 gpu-faults by a-1 and b-2 within 40 min`"""
    since: float
    until: float
    """When it is cleared, if nothing else fails there."""
    spared: bool = False
    """It is the last one that fits some request: used only where nothing else is free."""

    @property
    def name(self) -> str:
        """Its name in `Request.avoid`."""
        return self.node if self.gpu is None else gpu_name(self.node, self.gpu)


class HealthTracker:
    """Remembers failures. Not thread-safe. `failures` is its whole state: a tracker made from it behaves alike."""

    def __init__(self, rules: HealthRules | None = None, failures: Iterable[Failure] = ()) -> None:
        self.rules = rules or HealthRules()
        self._failures = list(failures)

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(self._failures)

    def failed(self, failure: Failure) -> None:
        """Records a failure. Repeating one is harmless. Causes that only the run can have are not recorded."""
        kept = failure.cause in NODE_CAUSES or (failure.cause in GPU_CAUSES and failure.gpus)
        if kept and failure not in self._failures:
            self._failures.append(failure)

    def went_well(self, node: str, gpus: Sequence[str] = ()) -> None:
        """A generation succeeded there, or an administrator says so: clears the node and these GPUs of it."""
        gone = set(gpus)
        kept = [
            failure if failure.node != node else replace(failure, gpus=_rest(failure.gpus, gone))
            for failure in self._failures
            if failure.node != node or failure.cause in GPU_CAUSES
        ]
        self._failures = [failure for failure in kept if failure.cause in NODE_CAUSES or failure.gpus]

    def avoid(self, run: str, now: float) -> frozenset[str]:
        """Where this run failed too often itself, for its `Request.avoid`."""
        own = [failure for failure in self._recent(now) if failure.run == run]
        return frozenset(
            _name(node, gpu)
            for node, gpu in _named(own)
            if len(_generations(_about(own, node, gpu))) >= self.rules.own
        )

    def aside(
        self, now: float, nodes: Sequence[NodeShape], requests: Sequence[Request] = ()
    ) -> tuple[Aside, ...]:
        """What is set aside now. `requests`: all that wait or run, which must still fit somewhere."""
        recent = self._recent(now)
        found = [self._judge(_about(recent, node, gpu), node, gpu) for node, gpu in _named(recent)]
        offered = {node.name: node for node in nodes}
        asides: list[Aside] = []
        for aside in sorted((aside for aside in found if aside is not None), key=lambda aside: aside.name):
            shape = offered.get(aside.node)
            if shape is None or (aside.gpu is not None and aside.gpu not in shape.gpus):
                continue
            needed = not _fit_without([*asides, aside], nodes, requests)
            asides.append(replace(aside, spared=needed))
        return tuple(asides)

    def _recent(self, now: float) -> list[Failure]:
        self._failures = [f for f in self._failures if now - f.at < self.rules.forgiven_after]
        return sorted(self._failures, key=lambda failure: failure.at)

    def _judge(self, failures: list[Failure], node: str, gpu: str | None) -> Aside | None:
        """`failures` in order of time. It is suspected from the failure that reached the limit."""
        since = None
        for position, last in enumerate(failures):
            within = [f for f in failures[: position + 1] if last.at - f.at < self.rules.window]
            enough_runs = gpu is not None or len({f.run for f in within}) >= self.rules.runs
            if enough_runs and len(_generations(within)) >= self.rules.failures:
                since, evidence = last.at, within
        if since is None:
            return None
        until = failures[-1].at + self.rules.forgiven_after
        return Aside(node, gpu, _reason(evidence), since, until)


def trusted(nodes: Sequence[NodeShape], asides: Iterable[Aside]) -> list[NodeShape]:
    """The nodes without what is set aside: such a node takes no new tasks, such a GPU is not assigned."""
    kept = [aside for aside in asides if not aside.spared]
    away = {aside.node for aside in kept if aside.gpu is None}
    gpus = {aside.name for aside in kept}
    return [
        replace(
            node,
            ready=node.ready and node.name not in away,
            gpus=tuple(gpu for gpu in node.gpus if gpu_name(node.name, gpu) not in gpus),
        )
        for node in nodes
    ]


def _fit_without(asides: Sequence[Aside], nodes: Sequence[NodeShape], requests: Sequence[Request]) -> bool:
    """Whether all requests that fit these nodes still fit, and the largest possible request too."""
    left = [node for node in trusted(nodes, asides) if node.ready]
    ready = [node for node in nodes if node.ready]
    if not left and ready:
        return False
    for domain in {node.domain for node in ready}:
        before = max(len(node.gpus) for node in ready if node.domain == domain)
        if max((len(node.gpus) for node in left if node.domain == domain), default=-1) < before:
            return False
    return all(
        ever_fits(request.asks, request.domains, left).ok
        for request in requests
        if ever_fits(request.asks, request.domains, ready).ok
    )


def _named(failures: Iterable[Failure]) -> list[tuple[str, str | None]]:
    """All nodes and GPUs that these failures concern."""
    found: dict[tuple[str, str | None], None] = {}
    for failure in failures:
        if failure.cause in NODE_CAUSES:
            found[failure.node, None] = None
        else:
            found.update(dict.fromkeys((failure.node, gpu) for gpu in failure.gpus))
    return list(found)


def _about(failures: Iterable[Failure], node: str, gpu: str | None) -> list[Failure]:
    causes = NODE_CAUSES if gpu is None else GPU_CAUSES
    return [f for f in failures if f.node == node and f.cause in causes and (gpu is None or gpu in f.gpus)]


def _generations(failures: Iterable[Failure]) -> set[tuple[str, str]]:
    return {(failure.run, failure.generation) for failure in failures}


def _rest(gpus: tuple[str, ...], gone: set[str]) -> tuple[str, ...]:
    return tuple(gpu for gpu in gpus if gpu not in gone)


def _name(node: str, gpu: str | None) -> str:
    return node if gpu is None else gpu_name(node, gpu)


def _reason(failures: Sequence[Failure]) -> str:
    number = len(_generations(failures))
    runs = list(dict.fromkeys(failure.run for failure in failures))
    names = ", ".join(runs[:3]) + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")
    causes = " and ".join(sorted({failure.cause for failure in failures}))
    minutes = (failures[-1].at - failures[0].at) / 60
    return f"{number} times {causes} within {max(1, round(minutes))} min ({names})"
