"""What each request holds, and what is free on each node.

Amounts are added and subtracted only here. Capacity may change under what is held: a node may shrink, lose a GPU, stop
being ready or vanish, and its holders keep what they hold. So free is
the capacity less what is held, at least zero. A GPU is free only while the node offers it and no request holds it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence

from stoker.errors import Conflict
from stoker.scheduling.model import ANYWHERE, Amount, NodeShape, Place, gpu_name

NOTHING = Amount(0, 0, 0)


class NodeAccount:
    """One node's account. `cpu`, `memory` and `gpu` are free amounts, never negative."""

    __slots__ = (
        "cpu",
        "free_gpus",
        "gpu",
        "gpu_holders",
        "memory",
        "name",
        "shape",
        "tags",
        "total",
        "used_cpu",
        "used_memory",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.shape: NodeShape | None = None
        """None: the node has vanished, and requests still hold something on it."""
        self.total = NOTHING
        self.tags = ANYWHERE
        self.used_cpu = 0
        self.used_memory = 0
        self.gpu_holders: dict[str, int] = {}
        """GPU -> number of holders: one, unless adopted requests contradict each other."""
        self.free_gpus: list[str] = []
        self.cpu = self.memory = self.gpu = 0

    @property
    def total_gpu(self) -> int:
        return self.total.gpu

    def offer(self, shape: NodeShape | None) -> None:
        self.shape = shape
        self.total = NOTHING if shape is None else shape.amount()
        self.tags = ANYWHERE if shape is None else shape.tags
        offered = () if shape is None else shape.gpus
        self.free_gpus = sorted({gpu for gpu in offered if gpu not in self.gpu_holders}, key=gpu_order)
        self._settle()

    def take(self, amount: Amount, gpus: Sequence[str]) -> None:
        self.used_cpu += amount.cpu
        self.used_memory += amount.memory
        for gpu in gpus:
            self.gpu_holders[gpu] = self.gpu_holders.get(gpu, 0) + 1
            if gpu in self.free_gpus:
                self.free_gpus.remove(gpu)
        self._settle()

    def give_back(self, amount: Amount, gpus: Sequence[str]) -> None:
        self.used_cpu -= amount.cpu
        self.used_memory -= amount.memory
        for gpu in gpus:
            self.gpu_holders[gpu] -= 1
            if not self.gpu_holders[gpu]:
                del self.gpu_holders[gpu]
                if self.shape is not None and gpu in self.shape.gpus:
                    insort(self.free_gpus, gpu, key=gpu_order)
        self._settle()

    def would_return(self, gpus: Sequence[str]) -> int:
        """How many of these GPUs would be free after they are given back."""
        offered = () if self.shape is None else self.shape.gpus
        return sum(gpu in offered and self.gpu_holders.get(gpu) == 1 for gpu in gpus)

    def _settle(self) -> None:
        cpu = self.total.cpu - self.used_cpu
        memory = self.total.memory - self.used_memory
        self.cpu = cpu if cpu > 0 else 0
        self.memory = memory if memory > 0 else 0
        self.gpu = len(self.free_gpus)


class Ledger:
    """What every node offers and every request holds.

    `open` are the nodes that take new tasks, by name. `growth` counts the times when more may have become free: what
    did not fit at one count does not fit later at the same count. `layout` counts changes of nodes.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, NodeAccount] = {}
        self._held: dict[str, tuple[tuple[Amount, ...], tuple[Place, ...]]] = {}
        self._holders: dict[str, dict[str, Amount]] = {}
        self.open: list[NodeAccount] = []
        self._open_in: dict[str, list[NodeAccount]] = {}
        """The same by domain, in order of name."""
        self._fields: list[list[NodeAccount]] = []
        self.growth = 0
        self.layout = 0

    def set_nodes(self, shapes: Sequence[NodeShape]) -> None:
        offered = {shape.name: shape for shape in shapes}
        if len(offered) != len(shapes):
            names = [shape.name for shape in shapes]
            twice = next(name for name in names if names.count(name) > 1)
            raise Conflict(f"two nodes are named {twice!r}", hint="Names of nodes must be unique.")
        for name in offered:
            self._nodes.setdefault(name, NodeAccount(name))
        for name, node in list(self._nodes.items()):
            node.offer(offered.get(name))
            self._forget_if_empty(node)
        self.open = [
            node for _, node in sorted(self._nodes.items()) if node.shape is not None and node.shape.ready
        ]
        self._open_in = {}
        for shape in sorted(shapes, key=lambda shape: (shape.domain, shape.name)):
            if shape.ready:
                self._open_in.setdefault(shape.domain, []).append(self._nodes[shape.name])
        self._fields = list(self._open_in.values())
        self.growth += 1
        self.layout += 1

    def fields(self, domains: tuple[str, ...]) -> list[list[NodeAccount]]:
        """The open nodes of each domain that a request may use, the preferred domain first."""
        if not domains:
            return self._fields
        return [self._open_in[domain] for domain in dict.fromkeys(domains) if domain in self._open_in]

    def shapes(self) -> tuple[NodeShape, ...]:
        return tuple(node.shape for _, node in sorted(self._nodes.items()) if node.shape is not None)

    def hold(self, holder: str, tasks: tuple[Amount, ...], places: tuple[Place, ...]) -> None:
        self._held[holder] = (tasks, places)
        for task, place in zip(tasks, places, strict=True):
            node = self._nodes.get(place.node)
            if node is None:
                node = self._nodes[place.node] = NodeAccount(place.node)
            node.take(task, place.gpus)
            by_holder = self._holders.setdefault(place.node, {})
            before = by_holder.get(holder, NOTHING)
            by_holder[holder] = Amount(
                before.cpu + task.cpu, before.memory + task.memory, before.gpu + len(place.gpus)
            )

    def release(self, holder: str) -> bool:
        """Returns whether it held anything."""
        held = self._held.pop(holder, None)
        if held is None:
            return False
        for task, place in zip(*held, strict=True):
            node = self._nodes[place.node]
            node.give_back(task, place.gpus)
            self._holders[place.node].pop(holder, None)
        for place in held[1]:
            if place.node in self._nodes:
                self._forget_if_empty(self._nodes[place.node])
        self.growth += 1
        return True

    def holds(self, holder: str) -> bool:
        return holder in self._held

    def node(self, name: str) -> NodeAccount:
        """The account of a node that exists, or on which something is held."""
        return self._nodes[name]

    def places(self, holder: str) -> tuple[Place, ...]:
        return self._held[holder][1]

    def domain_of(self, places: Sequence[Place]) -> str | None:
        """The domain of these places; None when none of their nodes exists."""
        nodes = [self._nodes[place.node] for place in places]
        return next((node.shape.domain for node in nodes if node.shape is not None), None)

    def on_node(self, name: str) -> Iterator[tuple[str, Amount]]:
        """The requests that hold something on this node, and how much."""
        yield from self._holders.get(name, {}).items()

    def choose(
        self, tasks: Sequence[Amount], nodes: Sequence[str], avoid: frozenset[str] = frozenset()
    ) -> tuple[Place, ...]:
        """Places with GPU ids: the lowest free ids of each node, task by task; those to avoid come last."""
        given: dict[str, int] = {}
        places = []
        for task, name in zip(tasks, nodes, strict=True):
            if not task.gpu:
                places.append(Place(name))
                continue
            first = given.get(name, 0)
            given[name] = first + task.gpu
            free = self._nodes[name].free_gpus
            if avoid:
                free = sorted(free, key=lambda gpu: gpu_name(name, gpu) in avoid)
            places.append(Place(name, tuple(free[first : first + task.gpu])))
        return tuple(places)

    def name_gpus(self, tasks: tuple[Amount, ...], places: Sequence[Place]) -> tuple[Place, ...]:
        """Gives GPU ids to tasks that are known to have GPUs there but not which ones: the lowest free ids, then,
        because the tasks do run there, ids that another request holds."""
        given: dict[str, set[str]] = {}
        for place in places:
            given.setdefault(place.node, set()).update(place.gpus)
        named = []
        for task, place in zip(tasks, places, strict=True):
            if task.gpu and not place.gpus:
                rest = [gpu for gpu in self._gpus_of(place.node) if gpu not in given[place.node]]
                place = Place(place.node, tuple(rest[: task.gpu]))
                given[place.node].update(place.gpus)
            named.append(place)
        return tuple(named)

    def _gpus_of(self, name: str) -> list[str]:
        """GPUs of the node, free ones first."""
        node = self._nodes.get(name)
        if node is None or node.shape is None:
            return []
        return node.free_gpus + sorted(set(node.shape.gpus).intersection(node.gpu_holders), key=gpu_order)

    def _forget_if_empty(self, node: NodeAccount) -> None:
        if node.shape is None and not self._holders.get(node.name):
            self._nodes.pop(node.name, None)
            self._holders.pop(node.name, None)


def gpu_order(gpu: str) -> tuple[int, int, str]:
    """Indexes by number, before names in alphabetical order."""
    return (0, int(gpu), "") if gpu.isdecimal() else (1, 0, gpu)
