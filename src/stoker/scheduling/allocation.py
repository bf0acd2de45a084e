"""What one request holds, task by task: its places, the tasks on loan, the further tasks it wants.

A task keeps its number for as long as the request holds anything: a request that gives back task 3 of five has the
tasks 0, 1, 2 and 4. So survivors stay the same tasks, and a new place for task 3 is a place for task 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from stoker.errors import Conflict
from stoker.scheduling.model import Ask, Held, Place, Request


class Allocation:
    """What one request holds. Its places are in the ledger, in the order of `indexes`."""

    may_grow = False
    giving: Mapping[int, str] = {}
    """Tasks it was told to give back and still has -> the request that gets the room. Replaced, never changed."""
    domain: str | None = None
    """The domain of a task that gave back its place: when all have, only this remembers it."""

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
            self.may_grow,
            tuple(sorted(self.giving.items())),
        )

    def restore(self, held: Held) -> None:
        """Restores everything but its places."""
        self.domain, self.may_grow, self.giving = held.domain, held.may_grow, dict(held.giving)

    @property
    def asks(self) -> list[Ask]:
        """The asks of the tasks that have a place."""
        tasks = self.request.tasks
        return [tasks[index] for index in self.indexes]

    def check(self, places: Sequence[Place], *, whole: bool = False) -> None:
        """Raises Conflict unless there is one place per task of the request; `whole`: for at least those it needs."""
        asks, tasks = len(self.request.asks), len(self.request.tasks)
        known = all(0 <= index < tasks for index in self.indexes) and len(set(self.indexes)) == len(places)
        if not known or (whole and len(places) < asks):
            number = f"{asks} to {tasks}" if self.request.extra else f"{tasks}"
            raise Conflict(
                f"{self.request.id} has {number} tasks and holds {len(places)} places",
                hint="Give one place for each task.",
            )

    def check_some(self, places: Sequence[Place], indexes: Sequence[int]) -> None:
        """Raises Conflict unless there is one place for each of these tasks, which all have a place."""
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
        """Tasks that it could give back and still have as many of each kind as it needs, the first to give back
        first. Without those that it was already told to give back.

        An extra stands in for an equal task that lost or gave back its place: a request for two workers that has two
        needs both, whichever two they are."""
        tasks = self.request.tasks
        need = Counter(self.request.asks)
        spare: list[int] = []
        for index in self.indexes:
            if need[tasks[index]]:
                need[tasks[index]] -= 1
            else:
                spare.append(index)
        return [index for index in reversed(spare) if index not in self.giving]

    def too_many(self) -> list[int]:
        """Tasks to give back because the request wants fewer, the first to give back first."""
        return self.on_loan()[: max(0, len(self.indexes) - len(self.giving) - self.request.most)]

    def wanted(self) -> list[int]:
        """Tasks it wants and does not have, most wanted first: those that an extra could stand in for."""
        room = self.request.most - len(self.indexes)
        if room <= 0 or not self.request.extra or self.giving:
            return []
        kinds = set(self.request.extra)
        free = [i for i, ask in enumerate(self.request.tasks) if i not in self.indexes and ask in kinds]
        return free[:room]
