"""Which node each task goes to: best fit, deterministic, pure.

GPUs are the scarce resource. A task with GPUs goes where the fewest remain, and a task without GPUs goes to a node
without them if there is room. Equal tasks of a gang share one node where possible. Ties go to the first name. A task
that names tags goes only to nodes with one of them. A gang stays within one domain: the first in which it fits. Nodes
to avoid are used only where a gang fits nowhere else.

Equal tasks are placed exactly: if they fit at all, they are placed. Gangs of unequal tasks are bin packing: first a
greedy pass, and if it fails, a search with a bounded number of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from stoker.scheduling.model import ANYWHERE, Amount, Shape, gpu_name, may_use

SEARCH_STEPS = 2_000
"""Bound of the search for a packing of unequal tasks: a few milliseconds."""


class Space(Protocol):
    """Something with free resources: a node of the ledger, or a `Room` copied from one."""

    @property
    def name(self) -> str: ...
    @property
    def cpu(self) -> int: ...
    @property
    def memory(self) -> int: ...
    @property
    def gpu(self) -> int: ...
    @property
    def total_gpu(self) -> int: ...
    @property
    def free_gpus(self) -> Sequence[str]: ...
    @property
    def tags(self) -> frozenset[str]: ...


S = TypeVar("S", bound=Space)


class Room:
    """A scratch copy of what is free on one node."""

    __slots__ = ("cpu", "free_gpus", "gpu", "memory", "name", "tags", "total_gpu")

    def __init__(
        self,
        name: str,
        cpu: int,
        memory: int,
        gpu: int,
        total_gpu: int,
        tags: frozenset[str] = ANYWHERE,
        free_gpus: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.cpu = cpu
        self.memory = memory
        self.gpu = gpu
        self.total_gpu = total_gpu
        self.tags = tags
        self.free_gpus = free_gpus
        """By name, before anything was taken from this copy."""

    @classmethod
    def of(cls, space: Space) -> Room:
        return cls(
            space.name, space.cpu, space.memory, space.gpu, space.total_gpu, space.tags, space.free_gpus
        )

    def take(self, task: Amount, times: int = 1) -> None:
        self.cpu -= task.cpu * times
        self.memory -= task.memory * times
        self.gpu -= task.gpu * times


def place_in_one(shape: Shape, fields: Iterable[Sequence[Space]]) -> list[str] | None:
    """As `place`, in the first of these fields in which all tasks fit."""
    if shape.avoid:
        fields = list(fields)
        for spaces in fields:
            nodes = place(shape, _without(shape.avoid, spaces))
            if nodes is not None:
                return nodes
    for spaces in fields:
        nodes = place(shape, spaces)
        if nodes is not None:
            return nodes
    return None


def place(shape: Shape, spaces: Sequence[Space]) -> list[str] | None:
    """The node of each task; None when they do not all fit. `spaces` are in order of name."""
    if len(shape.groups) == 1:
        task, among, indexes = shape.groups[0]
        eligible = within(among, spaces)
        if len(indexes) > 1:
            return _equal(task, len(indexes), eligible)
        best = _best(task, 1, eligible)
        return None if best is None else [best.name]
    return _greedy(shape, spaces) or _search(shape, spaces)


def within(among: frozenset[str], spaces: Sequence[S]) -> Sequence[S]:
    """The nodes that a task limited to these tags may use."""
    return [space for space in spaces if may_use(among, space.tags)] if among else spaces


def _without(avoid: frozenset[str], spaces: Sequence[Space]) -> list[Room]:
    """Copies of the nodes without these nodes and GPUs."""
    rooms = [Room.of(space) for space in spaces if space.name not in avoid]
    for room in rooms:
        clear = sum(gpu_name(room.name, gpu) not in avoid for gpu in room.free_gpus)
        room.gpu = min(room.gpu, clear)
    return rooms


def times(task: Amount, space: Space, limit: int) -> int:
    """How many such tasks fit there, at most `limit`."""
    if task.cpu:
        limit = min(limit, space.cpu // task.cpu)
    if task.memory:
        limit = min(limit, space.memory // task.memory)
    if task.gpu:
        limit = min(limit, space.gpu // task.gpu)
    return limit


def _best(task: Amount, count: int, spaces: Sequence[Space]) -> Space | None:
    """The node on which `count` such tasks leave the least free."""
    cpu, memory, gpu = task.cpu * count, task.memory * count, task.gpu * count
    best: Space | None = None
    best_score = (0, 0, 0)
    for space in spaces:
        if gpu > space.gpu or (cpu and cpu > space.cpu) or (memory and memory > space.memory):
            continue
        score = (space.gpu - gpu if gpu else space.total_gpu, space.cpu - cpu, space.memory - memory)
        if best is None or score < best_score:
            best, best_score = space, score
    return best


def _equal(task: Amount, count: int, spaces: Sequence[Space]) -> list[str] | None:
    """One node for all if one fits; else node by node, the tightest first. A node stays the tightest while it is
    filled, so this is best fit for each task in turn."""
    whole = _best(task, count, spaces)
    if whole is not None:
        return [whole.name] * count
    fits = [(times(task, space, count), space) for space in spaces]
    if sum(number for number, _ in fits) < count:
        return None
    chosen: list[str] = []
    for number, space in sorted(fits, key=lambda fit: _tightness(task, fit[1])):
        chosen.extend([space.name] * min(number, count - len(chosen)))
    return chosen


def _tightness(task: Amount, space: Space) -> tuple[int, int, int, str]:
    return (space.gpu if task.gpu else space.total_gpu, space.cpu, space.memory, space.name)


def _greedy(shape: Shape, spaces: Sequence[Space]) -> list[str] | None:
    rooms = [Room.of(space) for space in spaces]
    by_name = {room.name: room for room in rooms}
    chosen = [""] * shape.size
    for task, among, indexes in shape.groups:
        names = _equal(task, len(indexes), within(among, rooms))
        if names is None:
            return None
        for index, name in zip(indexes, names, strict=True):
            chosen[index] = name
            by_name[name].take(task)
    return chosen


def _search(shape: Shape, spaces: Sequence[Space]) -> list[str] | None:
    """Depth first over the tasks, the hardest first. Nodes that look alike are tried once."""
    rooms = [Room.of(space) for space in spaces]
    tasks = [(index, task, among) for task, among, indexes in shape.groups for index in indexes]
    chosen = [""] * shape.size
    steps = SEARCH_STEPS

    def descend(depth: int) -> bool:
        nonlocal steps
        if depth == len(tasks):
            return True
        index, task, among = tasks[depth]
        tried: set[tuple[int, int, int, frozenset[str]]] = set()
        for room in within(among, rooms):
            look = (room.cpu, room.memory, room.gpu, room.tags)
            if look in tried or not times(task, room, 1):
                continue
            tried.add(look)
            steps -= 1
            if steps < 0:
                return False
            room.take(task)
            chosen[index] = room.name
            if descend(depth + 1):
                return True
            room.take(task, -1)
        return False

    # The search could never finish for a gang above the bound, and would only recurse deeply.
    return chosen if len(tasks) <= 200 and descend(0) else None
