"""The queue: requests in the order in which they would start, and in buckets of equal shape.

Of requests with equal shape only the first matters: if it does not fit, none of them does. So a decision examines one
head per bucket, however many requests wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stoker.scheduling.model import Amount, Form, Request, Shape, form_of

Key = tuple[int, int, str]
"""(-priority, seq, id): sorts in the order of starting."""
LAST: Key = (1 << 62, 0, "")
"""A key after all keys of any queue."""


def key_of(request: Request) -> Key:
    return (-request.priority, request.seq, request.id)


class SortedKeys:
    """Distinct keys in order. Kept in short chunks, so that adding and removing move little memory, and the rank of a
    key is a sum over few chunks."""

    __slots__ = ("_chunks", "_lasts", "_size")
    CHUNK = 512

    def __init__(self) -> None:
        self._chunks: list[list[Key]] = []
        self._lasts: list[Key] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Key]:
        for chunk in self._chunks:
            yield from chunk

    def first(self) -> Key:
        return self._chunks[0][0]

    def at(self, rank: int) -> Key:
        """The key at this rank, which must exist."""
        for chunk in self._chunks:
            if rank < len(chunk):
                return chunk[rank]
            rank -= len(chunk)
        raise IndexError(rank)

    def add(self, key: Key) -> None:
        self._size += 1
        if not self._chunks:
            self._chunks.append([key])
            self._lasts.append(key)
            return
        at = min(bisect_left(self._lasts, key), len(self._lasts) - 1)
        chunk = self._chunks[at]
        insort(chunk, key)
        if len(chunk) > 2 * self.CHUNK:
            self._chunks[at : at + 1] = [chunk[: self.CHUNK], chunk[self.CHUNK :]]
            self._lasts.insert(at, chunk[self.CHUNK - 1])
            at += 1
        self._lasts[at] = self._chunks[at][-1]

    def remove(self, key: Key) -> None:
        """Removes a key, which must exist."""
        at = bisect_left(self._lasts, key)
        chunk = self._chunks[at]
        del chunk[bisect_left(chunk, key)]
        self._size -= 1
        if chunk:
            self._lasts[at] = chunk[-1]
        else:
            del self._chunks[at], self._lasts[at]

    def rank(self, key: Key) -> int:
        """How many keys come before it."""
        at = bisect_left(self._lasts, key)
        if at == len(self._chunks):
            return self._size
        return sum(map(len, self._chunks[:at])) + bisect_left(self._chunks[at], key)


class Term(NamedTuple):
    """What one kind of task of a shape may come to use on one node."""

    node: str
    task: Amount
    each: int
    """Such tasks in one request."""
    most: int
    """Such tasks that the whole node can hold."""


class Bucket:
    """Waiting requests of one shape, and what is known about the shape."""

    __slots__ = ("keys", "shape", "terms", "terms_at", "unfit_at")

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.keys = SortedKeys()
        self.unfit_at = -1
        """The ledger's `growth` at which this shape was last found not to fit."""
        self.terms: Sequence[Term] = ()
        """What it may use of the open nodes; empty: it would not fit on empty nodes."""
        self.terms_at = -1
        """The ledger's `layout` for which `terms` is valid."""


class Queue:
    def __init__(self) -> None:
        self._order = SortedKeys()
        self._requests: dict[str, Request] = {}
        self.buckets: dict[Form, Bucket] = {}
        self._least: tuple[list[int], list[int], list[int]] = ([], [], [])

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would start."""
        for key in self._order:
            yield self._requests[key[2]]

    def get(self, request: str) -> Request | None:
        return self._requests.get(request)

    def bucket(self, request: Request) -> Bucket:
        return self.buckets[form_of(request.asks, request.domains, request.avoid)]

    def position(self, request: Request) -> int:
        return self._order.rank(key_of(request)) + 1

    def add(self, request: Request) -> Bucket:
        key, form = key_of(request), form_of(request.asks, request.domains, request.avoid)
        bucket = self.buckets.get(form)
        if bucket is None:
            bucket = self.buckets[form] = Bucket(Shape(form))
            for column, value in zip(self._least, bucket.shape.least, strict=True):
                insort(column, value)
        bucket.keys.add(key)
        self._order.add(key)
        self._requests[request.id] = request
        return bucket

    def remove(self, request: str) -> Request | None:
        found = self._requests.pop(request, None)
        if found is None:
            return None
        key, form = key_of(found), form_of(found.asks, found.domains, found.avoid)
        bucket = self.buckets[form]
        bucket.keys.remove(key)
        self._order.remove(key)
        if not bucket.keys:
            del self.buckets[form]
            for column, value in zip(self._least, bucket.shape.least, strict=True):
                del column[bisect_left(column, value)]
        return found

    def least(self) -> Amount:
        """The smallest amount of each resource that any waiting task asks for. The queue must not be empty."""
        cpu, memory, gpu = self._least
        return Amount(cpu[0], memory[0], gpu[0])
