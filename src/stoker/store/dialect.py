"""What a database has to offer, and which one a url means.

Everything that differs between databases is behind this protocol; all other modules of the store are
written once. A new database is one file with a class of this shape, and has to pass
`stoker.testing.store_suite`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import Connection, Engine

from stoker.errors import StokerError, StoreError


class Dialect(Protocol):
    """One database. Made per store; holds no connections of its own between calls."""

    kind: str
    where: str
    """Where it is, for messages."""
    errors: tuple[type[Exception], ...]
    """What its driver may raise beside SQLAlchemy's own wrappers."""

    insert: Any
    """The insert construct that has `on_conflict_do_update` and `on_conflict_do_nothing`."""

    def exists(self) -> bool:
        """Whether there is a database. Raises StoreDamaged when there are only remains of one."""
        ...

    def create(self, build: Callable[[Engine], None]) -> None:
        """Make one in a single step: after a crash there is a whole database or none. Losing a race against
        another creator is success."""
        ...

    def writer(self) -> Engine:
        """An engine with one connection, whose transactions exclude every other writer from their start."""
        ...

    def readers(self) -> Engine:
        """An engine with a few connections, whose transactions see one consistent state and never wait."""
        ...

    def still_there(self) -> None:
        """Cheap, before each write. Raises StoreDamaged when what we write to is no longer what others open."""
        ...

    def verify(self, engine: Engine) -> None:
        """A bounded check on opening. Raises StoreDamaged."""
        ...

    def check(self, connection: Connection) -> list[str]:
        """A full check: what is wrong, in words; nothing when all is well."""
        ...

    def copy(self, target: Path) -> None:
        """A consistent copy that is checked and on disk when this returns; writers go on meanwhile."""
        ...

    def translate(self, exc: Exception) -> StokerError:
        """What a driver's error means to the caller."""
        ...


def dialect_for(url_or_path: str | Path, *, busy_timeout: float) -> Dialect:
    from stoker.store.sqlite import SqliteDialect  # the default needs its driver only when it is chosen

    text = str(url_or_path)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return SqliteDialect(Path(url_or_path), busy_timeout=busy_timeout)
    if scheme == SqliteDialect.kind and rest.startswith("/"):
        return SqliteDialect(Path(rest[1:]), busy_timeout=busy_timeout)
    raise StoreError(
        f"cannot use {scheme}:// as a database",
        hint=f"Give a path, or {SqliteDialect.kind}:///relative/path or {SqliteDialect.kind}:////absolute/path.",
    )
