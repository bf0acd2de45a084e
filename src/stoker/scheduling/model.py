"""The nouns of scheduling: what there is, what is asked, what was decided and why not.

Everything here is a value: comparable, hashable where it may be, and free of behaviour beyond arithmetic.
People write CPUs as floats; inside, all amounts are whole numbers (thousandths of a CPU, bytes, GPUs), so
that ten times 0.1 CPU fills one CPU exactly and nothing drifts over a million starts and ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stoker.errors import SpecError

ANYWHERE: frozenset[str] = frozenset()
"""The tags of a task that may go to any node."""

RESOURCES = ("cpu", "memory", "gpu")
"""In the order of an `Amount`."""


class Amount(NamedTuple):
    """Whole numbers of each resource. `cpu` is in thousandths, `memory` in bytes."""

    cpu: int
    memory: int
    gpu: int


@dataclass(frozen=True)
class NodeShape:
    """A machine as far as scheduling sees it: what may be handed out there."""

    name: str
    cpu: float
    memory: int
    gpus: tuple[str, ...] = ()
    """Ids that may be handed out now. One that is missing while held stays with its owner."""
    ready: bool = True
    """A node that is not ready takes nothing new; what is on it stays on it."""
    tags: frozenset[str] = frozenset()
    """What tasks may ask for by name (`Ask.among`): the pools it belongs to."""
    domain: str = ""
    """The cluster it belongs to. All tasks of one request land in one domain."""

    def amount(self) -> Amount:
        return Amount(_floor_milli(self.cpu), self.memory, len(set(self.gpus)))


@dataclass(frozen=True)
class Ask:
    """What one task needs, all of it on one node. 0: nothing is set aside for it."""

    cpu: float = 0
    memory: int = 0
    gpu: int = 0
    among: frozenset[str] = frozenset()
    """Only nodes with at least one of these tags; empty: any node. Engines write `CLUSTER`, `CLUSTER:pool:NAME`, and
    `:gpu` after it for nodes that are kept for GPU tasks: only the words for people (see `verdict`) know that."""
    name: str = field(default="", compare=False)
    """What people call the task, for the words only: tasks that differ in nothing else are alike."""

    def __post_init__(self) -> None:
        for name, value in zip(RESOURCES, (self.cpu, self.memory, self.gpu), strict=True):
            if not (math.isfinite(value) and value >= 0):
                raise SpecError(f"a task cannot ask for {name} = {value}", hint="Ask for zero or more.")

    def amount(self) -> Amount:
        return Amount(_ceil_milli(self.cpu), self.memory, self.gpu)


@dataclass(frozen=True)
class Request:
    """A run that wants to start: all of its `asks` or none, and then as many of `extra` as there is room for."""

    id: str
    priority: int
    seq: int
    """Order of submission; the same priority starts in this order."""
    asks: tuple[Ask, ...]
    """One for each task."""
    domains: tuple[str, ...] = ()
    """Only in one of these, the first in which all tasks fit; empty: any, in order of name."""
    extra: tuple[Ask, ...] = ()
    """Further tasks it would like, the dearest first. They are on loan: it gets them where nobody waits for the room,
    and gives them back when somebody does. Tasks are numbered through: the first extra is task `len(asks)`."""
    size: int | None = None
    """It wants no more tasks than this for now; None: all it may have."""
    avoid: frozenset[str] = frozenset()
    """Nodes by name and GPUs by `gpu_name`, on which nothing of it goes where it fits anywhere else."""

    def __post_init__(self) -> None:
        if not self.asks:
            raise SpecError(f"{self.id} asks for no task at all", hint="Give it at least one ask.")

    @property
    def tasks(self) -> tuple[Ask, ...]:
        return self.asks + self.extra

    @property
    def most(self) -> int:
        """So many tasks it wants for now."""
        every = len(self.asks) + len(self.extra)
        return every if self.size is None else min(every, max(self.size, len(self.asks)))


@dataclass(frozen=True)
class Place:
    """Where one task goes."""

    node: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Start:
    """A decision: this request starts now, its n-th task at the n-th place: all of its asks, and the first of its
    extras, as many as there are places more."""

    id: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Grow:
    """A decision: one that holds has these further tasks now."""

    id: str
    indexes: tuple[int, ...]
    """Their numbers."""
    places: tuple[Place, ...]
    """One for each."""


@dataclass(frozen=True)
class Shrink:
    """A decision: one that holds is to stop these tasks and give back their places (`Scheduler.release_part`). They
    are its own until it does."""

    id: str
    indexes: tuple[int, ...]
    asked_by: str = ""
    """Who waits for the room; empty: it wants fewer tasks itself."""


@dataclass(frozen=True)
class Held:
    """A request and what it holds."""

    request: Request
    places: tuple[Place, ...]
    indexes: tuple[int, ...] = ()
    """Which task each place is for, in order; empty: the first ones."""
    domain: str | None = None
    """Where the task was that lost its place: the others go there too."""
    lost: tuple[int, ...] = ()
    """Tasks that lost their place and wait for another."""
    done: tuple[int, ...] = ()
    """Tasks that gave back their place for good."""
    may_grow: bool = False
    giving: tuple[tuple[int, str], ...] = ()
    """Tasks it was told to give back and has not yet, each with who asked for it."""


@dataclass(frozen=True)
class Snapshot:
    """All that a scheduler knows. A scheduler made from it behaves like the one it was taken from."""

    nodes: tuple[NodeShape, ...] = ()
    queued: tuple[Request, ...] = ()
    """In the order they would start."""
    held: tuple[Held, ...] = ()


@dataclass(frozen=True)
class Feasibility:
    """Whether a request could start on these nodes if it were alone on them."""

    ok: bool
    reason: str = ""
    """`asks for 4 GPUs; the largest node has 2`"""
    task: int | None = None
    """The first task that is too big for every node; None when it is all of them together."""
    resource: str | None = None


@dataclass(frozen=True)
class Shortage:
    """What is missing on the node that comes nearest to holding the task."""

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
    """A run that holds some of what another one is short of, on a node that other one could use."""

    id: str
    resource: str
    amount: float


@dataclass(frozen=True)
class Explanation:
    """Why a request is where it is."""

    id: str
    state: str
    """held | starting (the next decision starts it) | waiting | impossible (on the nodes there are now)"""
    reason: str
    """One line for a person, lower-case, without a full stop."""
    position: int = 0
    """Place in the queue, from 1; 0 when it is not queued."""
    queued: int = 0
    """How many are in the queue."""
    short: tuple[Shortage, ...] = ()
    holders: tuple[Holder, ...] = ()
    """Who holds what is short, most first."""
    behind: str | None = None
    """The first run in the queue before it that wants the same resources."""
    places: tuple[Place, ...] = ()


class Group(NamedTuple):
    """Equal tasks of a request."""

    task: Amount
    among: frozenset[str]
    indexes: tuple[int, ...]
    """Their positions."""


Form = tuple[tuple[Amount, ...], tuple[frozenset[str], ...], tuple[str, ...], frozenset[str]]
"""What makes two shapes equal: the amounts and tags of each task, the domains, and what is avoided. Where no task
names a tag, the tags are left out."""


def form_of(asks: Sequence[Ask], domains: tuple[str, ...] = (), avoid: frozenset[str] = frozenset()) -> Form:
    for ask in asks:
        if ask.among:
            return amounts(asks), tuple([ask.among for ask in asks]), domains, avoid
    return amounts(asks), (), domains, avoid


class Shape:
    """The asks of a request, in whole numbers and grouped. Requests of equal shape are interchangeable but
    for their order, so the queue and the decisions think in shapes."""

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
        """No task of it asks for less of anything."""


def _hardness(group: Group) -> tuple[int, int, int, bool]:
    return (-group.task.gpu, -group.task.cpu, -group.task.memory, not group.among)


def welcome(among: frozenset[str], tags: frozenset[str]) -> bool:
    """Whether a task that may only go among these may go to a node with such tags."""
    return not among or not among.isdisjoint(tags)


def task_name(asks: Sequence[Ask], index: int) -> str:
    """As people call it."""
    return asks[index].name or f"task {index}"


def task_names(asks: Sequence[Ask], indexes: Sequence[int]) -> str:
    """All of them, or the first few and how many more."""
    names = [task_name(asks, index) for index in indexes]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def gpu_name(node: str, gpu: str) -> str:
    """A GPU among all GPUs: on many machines the first one is called 0."""
    return f"{node}#{gpu}"


def amounts(asks: Sequence[Ask]) -> tuple[Amount, ...]:
    return tuple([ask.amount() for ask in asks])


def in_units(resource: str, amount: int) -> float:
    """An inner whole number as people write it."""
    return amount / 1000 if resource == "cpu" else amount


def say(resource: str, amount: float) -> str:
    """`4 GPUs`, `1 CPU`, `0.5 CPUs`, `8Gi of memory`. `amount` as people write it."""
    if resource == "memory":
        return f"{_binary(int(amount))} of memory"
    name = resource.upper()
    return f"{amount:g} {name}" if amount == 1 else f"{amount:g} {name}s"


def _binary(size: int) -> str:
    value, unit = float(size), ""
    for larger in ("Ki", "Mi", "Gi", "Ti", "Pi"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{round(value, 1):g}{unit}" if unit else f"{size} bytes"


_ROUNDING = 1e-6
"""Forgives what binary fractions add: 0.1 * 3 is 300 thousandths, not 301."""


def _ceil_milli(cpu: float) -> int:
    return math.ceil(cpu * 1000 - _ROUNDING)


def _floor_milli(cpu: float) -> int:
    return math.floor(cpu * 1000 + _ROUNDING)
