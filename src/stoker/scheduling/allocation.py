"""One that holds, task by task: which it has, which it may give back, which it would like.

Tasks keep their number for as long as the request holds anything: one that gives back task 3 of five has the tasks
0, 1, 2 and 4. So survivors are the same tasks before and after, and a new place for task 3 is a place for task 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from stoker.errors import Conflict
from stoker.scheduling.model import Ask, Held, Place, Request

NONE: frozenset[int] = frozenset()


class Allocation:
    """What one request has. The places themselves are the ledger's, in the order of `indexes`."""

    lost = NONE
    """Tasks that lost their place and wait for another."""
    done = NONE
    """Tasks that gave back their place for good."""
    may_grow = False
    giving: Mapping[int, str] = {}
    """Tasks it was told to give back and has not yet, each with who asked for it. Replaced, never changed."""
    domain: str | None = None
    """Where a task was that lost its place: when all are lost, nothing else remembers it."""

    def __init__(self, request: Request, indexes: tuple[int, ...]) -> None:
        self.request = request
        self.indexes = indexes
        """The tasks that have a place, in order."""

    def held(self, places: tuple[Place, ...]) -> Held:
        return Held(
            self.request,
            places,
            self.indexes,
            self.domain,
            tuple(sorted(self.lost)),
            tuple(sorted(self.done)),
            self.may_grow,
            tuple(sorted(self.giving.items())),
        )

    def restore(self, held: Held) -> None:
        """All of it that is not its places."""
        self.lost, self.done, self.domain = frozenset(held.lost), frozenset(held.done), held.domain
        self.may_grow, self.giving = held.may_grow, dict(held.giving)

    @property
    def asks(self) -> list[Ask]:
        """Of the tasks that have a place."""
        tasks = self.request.tasks
        return [tasks[index] for index in self.indexes]

    def check(self, places: Sequence[Place], *, whole: bool = False) -> None:
        """One place for each task, and each task one of the request's; `whole`: at least those it needs."""
        asks, tasks = len(self.request.asks), len(self.request.tasks)
        known = all(0 <= index < tasks for index in self.indexes) and len(set(self.indexes)) == len(places)
        if not known or (whole and len(places) < asks):
            number = f"{asks} to {tasks}" if self.request.extra else f"{tasks}"
            raise Conflict(
                f"{self.request.id} has {number} tasks and holds {len(places)} places",
                hint="Give one place for each task.",
            )

    def check_some(self, places: Sequence[Place], indexes: Sequence[int]) -> None:
        """One place for each of these tasks, and each of them one that has a place."""
        if (
            len(places) != len(indexes)
            or len(set(indexes)) < len(indexes)
            or not set(indexes) <= set(self.indexes)
        ):
            raise Conflict(
                f"{self.request.id} holds places for its tasks {list(self.indexes)}; {len(places)} were given for {list(indexes)}",
                hint="Give one place for each task.",
            )

    def on_loan(self) -> list[int]:
        """The tasks it could give back and keep as many of each kind as it needs; the first to give back first.
        Not those that it was told to give back already.

        A task that lost its place or gave it back is stood in for by an extra that asks for the same: those who
        asked for two workers and have two need both, whichever two they are."""
        tasks = self.request.tasks
        need = Counter(ask for index, ask in enumerate(self.request.asks) if index not in self.done)
        spare: list[int] = []
        for index in self.indexes:
            if need[tasks[index]]:
                need[tasks[index]] -= 1
            else:
                spare.append(index)
        return [index for index in reversed(spare) if index not in self.giving]

    def needs(self, index: int) -> bool:
        """Whether it would have fewer of this kind than it needs without this task."""
        tasks = self.request.tasks
        others = {*self.indexes, *self.lost} - {index}
        need = sum(
            ask == tasks[index]
            for at, ask in enumerate(self.request.asks)
            if at == index or at not in self.done
        )
        return sum(tasks[other] == tasks[index] for other in others) < need

    def too_many(self) -> list[int]:
        """The tasks to give back because it wants fewer; the first to give back first."""
        has = len(self.indexes) + len(self.lost) + len(self.done) - len(self.giving)
        return self.on_loan()[: max(0, has - self.request.most)]

    def wanted(self) -> list[int]:
        """The tasks it would like and has not, the dearest first. Of tasks that are no extras only those that an
        extra could stand in for: the others it asks for itself (`Scheduler.replace`)."""
        room = self.request.most - len(self.indexes) - len(self.lost) - len(self.done)
        if room <= 0 or not self.request.extra or self.giving:
            return []
        kinds = set(self.request.extra)
        have = {*self.indexes, *self.lost, *self.done}
        free = [index for index, ask in enumerate(self.request.tasks) if index not in have and ask in kinds]
        return free[:room]
