"""The engines of one server: this machine, and the clusters that were added.

The queue knows each node by one name: `local`, or `CLUSTER/NODE`. Everything here belongs to the control loop's thread,
except `names` and the methods that only read a job.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.engine.base import Engine, Needs, Node, Observation, Presence
from stoker.errors import EngineUnavailable, NotFound, Refused
from stoker.frameworks.roles import parts_of
from stoker.scheduling import Ask, NodeShape, Place, Request
from stoker.spec import Job
from stoker.spec.roles import RoleTasks
from stoker.store.rows import RunRow
from stoker.task.fencing import TaskSight, Vigil

LOCAL = "local"
ANY = "any"


@dataclass
class FleetMember:
    """One engine and what it last reported."""

    engine: Engine
    nodes: Sequence[Node] = ()
    known: bool = False
    """It has reported its capacity since the server started."""
    trouble: str | None = None
    """Why it cannot be reached now."""
    vigil: Vigil = field(default_factory=Vigil)

    @property
    def name(self) -> str:
        return self.engine.name

    def node(self, name: str) -> Node | None:
        return next((node for node in self.nodes if node.name == name), None)


class Fleet:
    """Engines by name. The first one given is the server's own machine."""

    def __init__(self, engines: Iterable[Engine], default: str | None = None) -> None:
        self._members: dict[str, FleetMember] = {}
        for engine in engines:
            self._members[engine.name] = FleetMember(engine)
        self.home = next(iter(self._members))
        self.default = default or self.home
        """The engine of jobs that name no cluster."""

    def __iter__(self) -> Iterator[FleetMember]:
        return iter(list(self._members.values()))

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def add(self, engine: Engine) -> FleetMember:
        member = self._members[engine.name] = FleetMember(engine)
        return member

    def discard(self, name: str) -> FleetMember | None:
        return self._members.pop(name, None)

    def member(self, name: str) -> FleetMember:
        try:
            return self._members[name]
        except KeyError:
            raise NotFound(
                f"no cluster {name!r} here",
                hint=f"There are: {', '.join(self._members)}. `stoker cluster add` adds one.",
            ) from None

    def engine(self, name: str) -> Engine:
        """The engine of a recorded attempt. EngineUnavailable: it was removed; it may be added again."""
        try:
            return self._members[name].engine
        except KeyError:
            raise EngineUnavailable(f"the cluster {name!r} is not configured any more") from None

    # -- jobs ------------------------------------------------------------------------------------------------

    def candidates(self, job: Job) -> list[FleetMember]:
        """The engines that accept the job, the first choice first. Refused, with the reasons, when none does."""
        wanted = job.cluster or self.default
        if wanted != ANY:
            member = self.member(wanted)
            self._refuse(member, job)
            return [member]
        fitting: list[FleetMember] = []
        reasons: list[str] = []
        for member in self:
            try:
                self._refuse(member, job)
            except Refused as exc:
                reasons.append(f"{member.name}: {exc.message}")
            else:
                fitting.append(member)
        if not fitting:
            raise Refused("no engine here can run this:\n  " + "\n  ".join(reasons))
        return fitting

    def _refuse(self, member: FleetMember, job: Job) -> None:
        member.engine.refuse(job)
        for part in parts_of(job) if job.roles or job.framework else ():
            member.engine.refuse(part.job)

    def asks(self, job: Job) -> dict[str, Ask]:
        """What each task of the job asks of the queue, in the order of numbers: enough on every candidate engine."""
        members, found = self._possible(job), parts_of(job)
        by_role = {part.role: self._ask(part, members, found, job) for part in found}
        return {name: replace(by_role[name.rpartition("-")[0]], name=name) for name in self.task_names(job)}

    def _ask(
        self, part: RoleTasks, members: Sequence[FleetMember], found: Sequence[RoleTasks], job: Job
    ) -> Ask:
        needs = [self._need(member, part, found) for member in members]
        if not needs:
            return Ask(gpu=part.job.resources.gpu, among=frozenset({job.cluster or self.default}))
        anywhere = any(not need.among for need in needs)
        return Ask(
            cpu=max(need.cpu for need in needs),
            memory=max(need.memory for need in needs),
            gpu=max(need.gpu for need in needs),
            among=frozenset() if anywhere else frozenset().union(*(need.among for need in needs)),
        )

    def _need(self, member: FleetMember, part: RoleTasks, found: Sequence[RoleTasks]) -> Needs:
        """Tasks that set no CPU share this machine's CPUs: any number of them fits on an idle machine."""
        need = member.engine.needs(part.job)
        unset = sum(one.least for one in found if one.job.resources.cpu is None)
        if member.name != self.home or part.job.resources.cpu is not None or unset == 1:
            return need
        asked = sum(one.least * (one.job.resources.cpu or 0.0) for one in found)
        total = sum(node.cpu for node in member.nodes)
        share = math.floor(max(0.0, total - asked) / unset * 1000) / 1000
        return replace(need, cpu=min(need.cpu, share or 0.001)) if total else need

    def request(self, row: RunRow, job: Job) -> Request:
        asks = tuple(self.asks(job).values())
        least = len(asks) - (job.workers.max - job.workers.min)
        return Request(
            id=row.id,
            priority=row.priority,
            seq=row.seq,
            asks=asks[:least],
            extra=asks[least:],
            size=self.size(row, job),
            domains=tuple(member.name for member in self._possible(job)),
        )

    def size(self, row: RunRow, job: Job) -> int | None:
        """The most tasks the run may have, if a user scaled it."""
        wanted = row.record.get("workers_wanted")
        if not isinstance(wanted, int) or not job.workers.elastic:
            return None
        return (
            len(self.task_names(job)) - job.workers.max + min(max(wanted, job.workers.min), job.workers.max)
        )

    def task_names(self, job: Job) -> list[str]:
        """In the order of the queue's numbers: the required tasks, then the elastic ones."""
        found = parts_of(job)
        needed = [name for part in found for name in part.names[: part.least]]
        return needed + [name for part in found for name in part.names[part.least :]]

    def _possible(self, job: Job) -> list[FleetMember]:
        try:
            return self.candidates(job)
        except (Refused, NotFound):
            # The cluster was removed or changed: the run waits until an engine accepts it.
            return []

    # -- nodes -----------------------------------------------------------------------------------------------

    def shapes(self) -> list[NodeShape]:
        return [self._shape(member, node) for member in self for node in member.nodes]

    def _shape(self, member: FleetMember, node: Node) -> NodeShape:
        return NodeShape(
            name=self.full(member.name, node.name),
            cpu=node.cpu,
            memory=node.memory,
            gpus=tuple(gpu.id for gpu in node.gpus if gpu.healthy),
            ready=node.ready and member.trouble is None,
            tags=node.tags,
            domain=member.name,
        )

    def full(self, engine: str, node: str) -> str:
        return node if engine == self.home else f"{engine}/{node}"

    def bare(self, engine: str, node: str) -> str:
        """The engine's own name of a node."""
        return node.removeprefix(f"{engine}/")

    def engine_of(self, places: Sequence[Place]) -> str:
        """The engine that these nodes belong to. No name of a cluster or machine has a slash."""
        head, slash, _ = places[0].node.partition("/")
        return head if slash else self.home

    def node(self, engine: str, name: str) -> Node | None:
        """A node by the queue's name of it."""
        return self._members[engine].node(self.bare(engine, name)) if engine in self._members else None

    def isolation(self, engine: str, node: str) -> dict[str, str]:
        found = self.node(engine, node)
        return dict(found.isolation) if found else {}


def sight(seen: Observation, job: Job) -> TaskSight:
    """An observation as the vigil sees it."""
    return TaskSight(
        task=f"{seen.run}/{seen.attempt}/{seen.task}/{seen.incarnation}",
        presence=str(seen.presence),
        node=seen.node,
        node_ready=seen.node_ready,
        lost_after=job.lost_after,
        lease=job.lease,
        exclusive=job.exclusive,
    )


@dataclass
class Wait:
    """Why a task is not up yet, as the engine reports it, and since when."""

    text: str
    cause: str = ""
    patience: float = 600.0
    since: float = field(
        default_factory=lambda: time.monotonic()
    )  # not bound at import: a test may drive the clock
    no_room: bool = False
    """It waits for capacity that other runs may give back."""

    def follow(self, seen: Observation) -> Wait:
        """The clock goes on while the hopeless cause is the same, even if the text changes."""
        since = self.since if seen.hopeless == self.cause else time.monotonic()
        return Wait(seen.waiting, seen.hopeless, seen.patience, since, seen.no_room)

    @property
    def over(self) -> bool:
        return bool(self.cause) and time.monotonic() - self.since > self.patience


def said(observation: Observation) -> dict[str, Any]:
    """An observation as evidence for a cause."""
    found = dict(observation.evidence)
    if observation.proof:
        found.setdefault("proof", observation.proof)
    if observation.presence is not Presence.ALIVE and observation.node:
        found.setdefault("node", observation.node)
    return found
