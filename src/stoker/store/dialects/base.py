"""What a database has to offer, and which one a url means.

Everything that differs between databases is behind this protocol; all other modules of the store are
written once. A new database is one file with a class of this shape, and has to pass
`stoker.testing.store_suite`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import Connection, Engine

from stoker.errors import StokerError, StoreError
from stoker.store.dialects.postgres_url import SCHEMES as SERVED
from stoker.store.dialects.postgres_url import secret_parts
from stoker.store.dialects.sqlite_files import SCHEME as FILE

if TYPE_CHECKING:
    from stoker.store.dialects.sqlite import SqliteDialect


class Dialect(Protocol):
    """One database. Made per store; holds no connections of its own between calls."""

    kind: str
    where: str
    """Where it is, for messages: never a password."""
    shared: bool
    """Whether several servers reach it, so that one of them has to lead."""
    patience: float
    """Seconds that what failed for a transient reason is tried again."""
    errors: tuple[type[Exception], ...]
    """What its driver may raise beside SQLAlchemy's own wrappers."""

    insert: Any
    """The insert construct that has `on_conflict_do_update` and `on_conflict_do_nothing`."""

    def exists(self) -> bool:
        """Whether there is a database. Raises StoreDamaged when there are only remains of one."""
        ...

    def create(self, build: Callable[[Connection], None]) -> None:
        """Make one in a single step: after a crash there is a whole database or none. Losing a race against
        another creator is success."""
        ...

    def writer(self) -> Engine:
        """An engine with one connection, whose transactions exclude every other writer from their start."""
        ...

    def readers(self) -> Engine:
        """An engine with a few connections, whose transactions see one consistent state and never wait."""
        ...

    def apart(self) -> Engine:
        """An engine with one connection, outside the order of writers. Only for databases that are shared."""
        ...

    def still_there(self) -> None:
        """Cheap, before each write. Raises StoreDamaged when what we write to is no longer what others open."""
        ...

    def mark(self) -> Any:
        """What tells the writing transaction under way from all others; None where a commit that raises has
        certainly not taken place."""
        ...

    def committed(self, mark: Any) -> bool:
        """Whether it was committed after all."""
        ...

    def verify(self, engine: Engine) -> None:
        """A bounded check on opening. Raises StoreDamaged."""
        ...

    def check(self, connection: Connection) -> list[str]:
        """A full check: what is wrong, in words; nothing when all is well."""
        ...

    def copy(self, target: Path) -> None:
        """A consistent copy, as a file, that is checked and on disk when this returns; writers go on meanwhile."""
        ...

    def keep_before_migration(self, found: int) -> None:
        """Whatever makes it possible to go back to this version of the schema."""
        ...

    def unhurried(self, connection: Connection) -> None:
        """Let the transaction under way take as long as it likes."""
        ...

    def loaded(self, connection: Connection) -> None:
        """Called after rows were added together with numbers that the database would have given them."""
        ...

    def transient(self, problem: Exception) -> bool:
        """Whether trying the whole transaction again may help."""
        ...

    def translate(self, exc: Exception) -> StokerError:
        """What a driver's error means to the caller."""
        ...


def dialect_for(url_or_path: str | Path, *, busy_timeout: float = 5.0, epoch: int | None = None) -> Dialect:
    """`epoch`: the fence of a server that leads; databases that are not shared need none."""
    text = str(url_or_path)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return file_dialect(Path(url_or_path), busy_timeout=busy_timeout)
    if scheme in SERVED:
        # The driver is needed only when it is chosen.
        from stoker.store.dialects.postgres import PostgresDialect

        return PostgresDialect(text, busy_timeout=busy_timeout, epoch=epoch)
    if scheme == FILE and rest.startswith("/"):
        return file_dialect(Path(rest[1:]), busy_timeout=busy_timeout)
    raise StoreError(
        f"cannot use {scheme[:40]!r} as a database",
        hint=f"Give a path, {FILE}:///relative/path, {FILE}:////absolute/path or {SERVED[0]}://user@host/name.",
    )


def file_dialect(path: Path, *, busy_timeout: float = 5.0) -> SqliteDialect:
    """The one that is kept in a file."""
    from stoker.store.dialects.sqlite import SqliteDialect  # as above

    return SqliteDialect(path, busy_timeout=busy_timeout)


def secrets_in(url_or_path: str | Path) -> list[str]:
    """What of it must never be shown. Connects to nothing."""
    return secret_parts(str(url_or_path)) if is_shared(url_or_path) else []


def is_shared(url_or_path: str | Path) -> bool:
    """Whether it is a database that several servers reach. Connects to nothing."""
    scheme, separator, _ = str(url_or_path).partition("://")
    return bool(separator) and scheme in SERVED
