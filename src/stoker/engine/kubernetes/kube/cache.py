"""`Cache`: what a cluster holds of some kinds of objects, kept up to date by list and watch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass

from stoker.engine.kubernetes.kube.client import Kube, Object
from stoker.engine.kubernetes.kube.kinds import Kind


@dataclass(frozen=True)
class Select:
    """Which objects of a kind. One list and one watch each."""

    kind: Kind
    namespace: str | None = None
    """None: the configured one; "": all"""
    labels: str = ""
    fields: str = ""


@dataclass(frozen=True)
class Change:
    kind: Kind
    namespace: str
    name: str
    object: Object
    """As it is now; as it was last, if `deleted`."""
    deleted: bool = False


class Cache:
    """A mirror of each of `selects` (one per kind). Belongs to one event loop.

    Reading never waits. It raises EngineUnavailable until the first list has come, and while nothing was heard of
    that kind for `max_silence` seconds (a watch is ended and begun anew well before): never an empty or a stale
    answer instead. What it returns is shared: read only.
    """

    def __init__(
        self,
        kube: Kube,
        selects: Iterable[Select | Kind],
        *,
        max_silence: float = 30.0,
        trim: Callable[[Object], Object] | None = None,
    ) -> None:
        """`trim` may drop from each object what nobody reads (managedFields go anyway)."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin; inside the event loop."""

    async def close(self) -> None:
        """Ends the watches and the readers of `changes`; nothing is left running."""

    async def ready(self, timeout: float = 60) -> None:
        """Wait until every kind was listed. EngineUnavailable, with the reason, after `timeout`."""

    def fresh(self, kind: Kind | None = None) -> bool:
        """Whether reading (all kinds, or one) would answer now."""
        raise NotImplementedError

    def problem(self, kind: Kind | None = None) -> str:
        """Why it is not, or why the last try failed; "" when all is well."""
        raise NotImplementedError

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object | None:
        raise NotImplementedError

    def list(self, kind: Kind, labels: Mapping[str, str] | None = None) -> list[Object]:
        """Those whose labels have all of these values."""
        raise NotImplementedError

    def note(self, kind: Kind, obj: Object) -> None:
        """What a write of ours returned, so that it is seen before the watch brings it. Older news is ignored."""

    def changes(self) -> AsyncIterator[Change]:
        """What changes from now on, each object waiting at most once. After an outage what vanished meanwhile comes
        as deleted. Ends with `close`."""
        raise NotImplementedError
