"""The values of scheduling: nodes, requests, decisions and explanations.

They are comparable, hashable where possible, and have no behaviour beyond arithmetic. Users write CPUs as floats.
Inside, all amounts are integers (thousandths of a CPU, bytes, GPUs). So ten times 0.1 CPU fills one CPU exactly, and
nothing drifts over a million starts and ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stoker.errors import SpecError
from stoker.task.units import readable_size

ANYWHERE: frozenset[str] = frozenset()
"""The tags of a task that may run on any node."""

RESOURCES = ("cpu", "memory", "gpu")
"""In the order of an `Amount`."""


class Amount(NamedTuple):
    """An integer per resource. `cpu` is in thousandths, `memory` in bytes."""

    cpu: int
    memory: int
    gpu: int


@dataclass(frozen=True)
class NodeShape:
    """A node as the scheduler sees it: what it may give to tasks."""

    name: str
    cpu: float
    memory: int
    gpus: tuple[str, ...] = ()
    """Ids that may be assigned now. A GPU that is missing while held stays with its holder."""
    ready: bool = True
    """A node that is not ready takes no new tasks; tasks on it stay."""
    tags: frozenset[str] = frozenset()
    """Names that tasks may ask for (`Ask.among`): the pools of the node."""
    domain: str = ""
    """Its cluster. All tasks of one request are placed in one domain."""

    def amount(self) -> Amount:
        return Amount(_floor_milli(self.cpu), self.memory, len(set(self.gpus)))


@dataclass(frozen=True)
class Ask:
    """What one task needs, all of it on one node. 0: nothing is reserved for it."""

    cpu: float = 0
    memory: int = 0
    gpu: int = 0
    among: frozenset[str] = frozenset()
    """Only nodes with at least one of these tags; empty: any node. Engines write `CLUSTER`, `CLUSTER:pool:NAME`, and
    `:gpu` after it for nodes reserved for GPU tasks. Only the messages (see `feasibility`) know that form."""
    name: str = field(default="", compare=False)
    """The task's name for messages. Tasks that differ in nothing else are equal."""

    def __post_init__(self) -> None:
        for name, value in zip(RESOURCES, (self.cpu, self.memory, self.gpu), strict=True):
            if not (math.isfinite(value) and value >= 0):
                raise SpecError(f"a task cannot ask for {name} = {value}", hint="Ask for zero or more.")

    def amount(self) -> Amount:
        return Amount(_ceil_milli(self.cpu), self.memory, self.gpu)


@dataclass(frozen=True)
class Request:
    """A run that wants to start: with all of its `asks` or none, then with as many of `extra` as there is room for."""

    id: str
    priority: int
    seq: int
    """Order of submission. Runs of equal priority start in this order."""
    asks: tuple[Ask, ...]
    """One for each task."""
    domains: tuple[str, ...] = ()
    """Only in one of these, the first in which all tasks fit. Empty: in any, in order of name."""
    extra: tuple[Ask, ...] = ()
    """Further tasks it would like, most wanted first. They are on loan: it gets them while no other request waits for
    the room, and gives them back when one does. Tasks are numbered through: the first extra is task `len(asks)`."""
    size: int | None = None
    """It wants at most this many tasks for now; None: all it may have."""
    avoid: frozenset[str] = frozenset()
    """Nodes by name and GPUs by `gpu_name` that it uses only where it fits nowhere else."""

    def __post_init__(self) -> None:
        if not self.asks:
            raise SpecError(f"{self.id} asks for no task at all", hint="Give it at least one ask.")

    @property
    def tasks(self) -> tuple[Ask, ...]:
        return self.asks + self.extra

    @property
    def most(self) -> int:
        """How many tasks it wants for now."""
        every = len(self.asks) + len(self.extra)
        return every if self.size is None else min(every, max(self.size, len(self.asks)))


@dataclass(frozen=True)
class Place:
    node: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Start:
    """A decision: this request starts now, task n at place n: all of its asks, and as many of its extras as there are
    further places."""

    id: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Grow:
    """A decision: a running request gets these further tasks now."""

    id: str
    indexes: tuple[int, ...]
    """Their numbers."""
    places: tuple[Place, ...]
    """One for each."""


@dataclass(frozen=True)
class Shrink:
    """A decision: a running request is to stop these tasks and give back their places (`Scheduler.release_part`). It
    holds them until it does."""

    id: str
    indexes: tuple[int, ...]
    asked_by: str = ""
    """The request that waits for the room; empty: it wants fewer tasks itself."""


@dataclass(frozen=True)
class Held:
    request: Request
    places: tuple[Place, ...]
    indexes: tuple[int, ...] = ()
    """The task of each place, in order; empty: the first ones."""
    domain: str | None = None
    """The domain of a task that gave back its place: others go there too."""
    may_grow: bool = False
    giving: tuple[tuple[int, str], ...] = ()
    """Tasks it was told to give back and still has, each with the request that gets the room."""


@dataclass(frozen=True)
class Snapshot:
    """The whole state of a scheduler. A scheduler made from it behaves like the original."""

    nodes: tuple[NodeShape, ...] = ()
    queued: tuple[Request, ...] = ()
    """In the order in which they would start."""
    held: tuple[Held, ...] = ()


@dataclass(frozen=True)
class Feasibility:
    """Whether a request could start on these nodes if they were empty."""

    ok: bool
    reason: str = ""
    """`asks for 4 GPUs; the largest node has 2`"""
    task: int | None = None
    """The first task that is too large for every node; None: all tasks together are too large."""
    resource: str | None = None


@dataclass(frozen=True)
class Shortage:
    """What is missing on the node where least is missing for the task."""

    resource: str
    """cpu | memory | gpu"""
    asked: float
    free: float
    node: str

    @property
    def short(self) -> float:
        return round(self.asked - self.free, 3)


@dataclass(frozen=True)
class Holder:
    """A run that holds some of what another run lacks, on a node that the other run could use."""

    id: str
    resource: str
    amount: float


@dataclass(frozen=True)
class Explanation:
    """Why a request has not started, or what it holds."""

    id: str
    state: str
    """held | starting (the next decision starts it) | waiting | impossible (on the present nodes)"""
    reason: str
    """One line for the user, lower-case, without a full stop."""
    position: int = 0
    """Place in the queue, from 1; 0 when it is not queued."""
    queued: int = 0
    """Length of the queue."""
    short: tuple[Shortage, ...] = ()
    holders: tuple[Holder, ...] = ()
    """The runs that hold what is short, largest amount first."""
    behind: str | None = None
    """The first run before it in the queue that wants the same resources."""
    places: tuple[Place, ...] = ()


class Group(NamedTuple):
    """Equal tasks of a request."""

    task: Amount
    among: frozenset[str]
    indexes: tuple[int, ...]
    """Their positions."""


Form = tuple[tuple[Amount, ...], tuple[frozenset[str], ...], tuple[str, ...], frozenset[str]]
"""What makes two shapes equal: amounts and tags of each task, domains, and what is avoided. Tags are left out where no
task names one."""


def form_of(asks: Sequence[Ask], domains: tuple[str, ...] = (), avoid: frozenset[str] = frozenset()) -> Form:
    for ask in asks:
        if ask.among:
            return amounts(asks), tuple([ask.among for ask in asks]), domains, avoid
    return amounts(asks), (), domains, avoid


class Shape:
    """The asks of a request as integers, grouped. Requests of equal shape differ only in their order, so the queue
    and the decisions work on shapes."""

    __slots__ = ("avoid", "domains", "groups", "indexes", "least", "size", "tasks")

    def __init__(self, form: Form) -> None:
        self.tasks, tags, self.domains, self.avoid = tasks, _, _, _ = form
        self.size = len(tasks)
        self.indexes = tuple(range(self.size))
        kinds: dict[tuple[Amount, frozenset[str]], list[int]] = {}
        for index, task in enumerate(tasks):
            kinds.setdefault((task, tags[index] if tags else ANYWHERE), []).append(index)
        groups = [Group(task, among, tuple(indexes)) for (task, among), indexes in kinds.items()]
        self.groups = tuple(sorted(groups, key=_hardness))
        """The hardest to place first."""
        self.least = Amount(*(min(column) for column in zip(*tasks, strict=True)))
        """The smallest amount of each resource among its tasks."""


def _hardness(group: Group) -> tuple[int, int, int, bool]:
    return (-group.task.gpu, -group.task.cpu, -group.task.memory, not group.among)


def may_use(among: frozenset[str], tags: frozenset[str]) -> bool:
    """Whether a task limited to the tags `among` may run on a node with these `tags`."""
    return not among or not among.isdisjoint(tags)


def task_name(asks: Sequence[Ask], index: int) -> str:
    """The task's name for messages."""
    return asks[index].name or f"task {index}"


def task_names(asks: Sequence[Ask], indexes: Sequence[int]) -> str:
    """All names, or the first few and the number of the others."""
    names = [task_name(asks, index) for index in indexes]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def gpu_name(node: str, gpu: str) -> str:
    """A name that is unique among all GPUs: on every node the first one has index 0."""
    return f"{node}#{gpu}"


def amounts(asks: Sequence[Ask]) -> tuple[Amount, ...]:
    return tuple([ask.amount() for ask in asks])


def in_units(resource: str, amount: int) -> float:
    """An internal integer in the units that users write."""
    return amount / 1000 if resource == "cpu" else amount


def amount_text(resource: str, amount: float) -> str:
    """`4 GPUs`, `1 CPU`, `0.5 CPUs`, `8 GiB of memory`. `amount` is in the units that users write."""
    if resource == "memory":
        return f"{readable_size(amount)} of memory"
    name = resource.upper()
    return f"{amount:g} {name}" if amount == 1 else f"{amount:g} {name}s"


_ROUNDING = 1e-6
"""Tolerance for binary fractions: 0.1 * 3 is 300 thousandths, not 301."""


def _ceil_milli(cpu: float) -> int:
    return math.ceil(cpu * 1000 - _ROUNDING)


def _floor_milli(cpu: float) -> int:
    return math.floor(cpu * 1000 + _ROUNDING)
