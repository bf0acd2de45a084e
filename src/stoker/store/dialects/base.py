"""What a database has to offer, and which database a URL means.

Everything that differs between databases is behind this protocol; the other modules of the store are written once. A
new database is one file with a class of this shape that passes `stoker.testing.store_suite`.
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
    """One database. Made per store; keeps no connections between calls."""

    kind: str
    where: str
    """Its address for messages, without a password."""
    shared: bool
    """Whether several servers share it, so that one of them has to lead."""
    patience: float
    """Seconds during which work that failed for a transient reason is repeated."""
    errors: tuple[type[Exception], ...]
    """What its driver may raise besides SQLAlchemy's wrappers."""

    insert: Any
    """The insert construct that has `on_conflict_do_update` and `on_conflict_do_nothing`."""

    def exists(self) -> bool:
        """Whether there is a database. Raises StoreDamaged when there are only parts of one."""
        ...

    def create(self, build: Callable[[Connection], None]) -> None:
        """Creates the database in one step: after a crash it is complete or absent. Losing a race against another
        creator is success."""
        ...

    def writer(self) -> Engine:
        """An engine with one connection, whose transactions exclude every other writer from their start."""
        ...

    def readers(self) -> Engine:
        """An engine with a few connections, whose transactions see one consistent state and never wait."""
        ...

    def apart(self) -> Engine:
        """An engine with one connection, outside the order of writers. Only for shared databases."""
        ...

    def check_replaced(self) -> None:
        """Called before each write, cheap. Raises StoreDamaged when the open file is no longer the one at the path."""
        ...

    def mark(self) -> Any:
        """Identifies the writing transaction under way. None for a database in which a commit that raises has
        certainly not taken place."""
        ...

    def committed(self, mark: Any) -> bool:
        """Whether that transaction was committed after all."""
        ...

    def verify(self, engine: Engine) -> None:
        """A check of bounded duration on opening. Raises StoreDamaged."""
        ...

    def check(self, connection: Connection) -> list[str]:
        """A full check: a description of each fault; nothing for an intact database."""
        ...

    def copy(self, target: Path) -> None:
        """Makes a consistent copy as a file, checked and synced on return. Writers go on meanwhile."""
        ...

    def keep_before_migration(self, found: int) -> None:
        """Saves what is needed to go back to this version of the schema."""
        ...

    def lift_time_limits(self, connection: Connection) -> None:
        """Lifts the time limits of the transaction under way."""
        ...

    def loaded(self, connection: Connection) -> None:
        """Called after rows were added with explicit numbers that the database would otherwise assign."""
        ...

    def transient(self, problem: Exception) -> bool:
        """Whether repeating the whole transaction may help."""
        ...

    def translate(self, exc: Exception) -> StokerError:
        """The error of `stoker.errors` for a driver's error."""
        ...


def dialect_for(url_or_path: str | Path, *, busy_timeout: float = 5.0, epoch: int | None = None) -> Dialect:
    """`epoch`: the fence of a leading server. Databases that are not shared need none."""
    text = str(url_or_path)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return file_dialect(Path(url_or_path), busy_timeout=busy_timeout)
    if scheme in SERVED:
        # Imports the driver only where it is used.
        from stoker.store.dialects.postgres import PostgresDialect

        return PostgresDialect(text, busy_timeout=busy_timeout, epoch=epoch)
    if scheme == FILE and rest.startswith("/"):
        return file_dialect(Path(rest[1:]), busy_timeout=busy_timeout)
    raise StoreError(
        f"cannot use {scheme[:40]!r} as a database",
        hint=f"Give a path, {FILE}:///relative/path, {FILE}:////absolute/path or {SERVED[0]}://user@host/name.",
    )


def file_dialect(path: Path, *, busy_timeout: float = 5.0) -> SqliteDialect:
    from stoker.store.dialects.sqlite import SqliteDialect  # lazy: as above

    return SqliteDialect(path, busy_timeout=busy_timeout)


def secrets_in(url_or_path: str | Path) -> list[str]:
    """Parts of the URL that must never be shown. Connects to nothing."""
    return secret_parts(str(url_or_path)) if is_shared(url_or_path) else []


def is_shared(url_or_path: str | Path) -> bool:
    """Whether several servers can share it. Connects to nothing."""
    scheme, separator, _ = str(url_or_path).partition("://")
    return bool(separator) and scheme in SERVED
