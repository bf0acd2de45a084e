"""Connections and transactions, the same for every kind of database."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from stoker.errors import NotLeading, StoreBusy, StoreDamaged, StoreError
from stoker.store.codec import RESTORE_HINT
from stoker.store.dialects.base import Dialect
from stoker.store.retry import with_retries

WRITER_WAIT = 60.0
"""Seconds that a writer waits for the other writers of this process. Transactions take milliseconds, so more means
a hanging disk or an unreachable database."""

P = ParamSpec("P")
T = TypeVar("T")


class Database:
    """One writer, several readers. Safe from any thread.

    `write(work, ...)` takes the process-wide lock and a transaction that excludes other writers from its start. It
    calls `work(connection, ...)`, commits when that returns and rolls back when it raises. `read` is the same on a
    snapshot, without the lock. Work that fails because of a lock or a lost connection is repeated from its beginning,
    so it may change nothing but its connection. Every database error is raised as one of `stoker.errors`.
    """

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.damaged: str | None = None
        """Why the database is no longer written to; None while it is intact."""
        self.on_fenced: Callable[[], None] = lambda: None
        """Called when another server has taken over, before NotLeading is raised."""
        self._closed = False
        self._lock = threading.Lock()
        self.writer = dialect.writer()
        self.readers = dialect.readers()

    def read(self, work: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        def once() -> T:
            with self.readers.connect() as connection:
                return work(connection, *args, **kwargs)

        self._ensure_open()
        return self._guarded(once)

    def write(self, work: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        def once() -> T:
            self.dialect.check_replaced()
            with self.writer.connect() as connection:
                connection.begin()
                result = work(connection, *args, **kwargs)
                self._commit(connection)
                return result

        self._ensure_open()
        if self.damaged is not None:
            raise StoreDamaged(f"{self.damaged}; nothing more is written", hint=RESTORE_HINT)
        if not self._lock.acquire(timeout=WRITER_WAIT):
            raise StoreBusy(f"writing to {self.dialect.where} has been stuck for {WRITER_WAIT:g} s")
        try:
            return self._guarded(once)
        finally:
            self._lock.release()

    def _commit(self, connection: Connection) -> None:
        mark = self.dialect.mark()
        try:
            connection.commit()
        except _errors(self.dialect):
            # When the connection was lost meanwhile, the commit may or may not have taken place.
            if mark is None or not self.dialect.committed(mark):
                raise

    def verify(self) -> None:
        self._guarded(lambda: self.dialect.verify(self.writer))

    def check(self) -> list[str]:
        try:
            found = self.read(self.dialect.check)
        except StoreDamaged as exc:
            return [exc.message]
        if found and self.damaged is None:
            self.damaged = f"the database {self.dialect.where} is damaged: {found[0]}"
        return found

    def copy(self, target: Path) -> None:
        self._ensure_open()
        try:
            with translated(self.dialect):
                self.dialect.copy(target)
        except StoreDamaged:
            self.check()  # the fault may be on the copy's disk: only damage of the database itself stops writing
            raise

    def close(self) -> None:
        self._closed = True
        with self._lock:
            self.readers.dispose()
            self.writer.dispose()

    def _guarded(self, work: Callable[[], T]) -> T:
        """Repeats the work while that may help. Remembers damage and the loss of the lead."""
        try:
            with translated(self.dialect):
                return with_retries(work, self.dialect.transient, self.dialect.patience)
        except StoreDamaged as exc:
            if self.damaged is None:
                self.damaged = exc.message
            raise
        except NotLeading:
            self.on_fenced()
            raise

    def _ensure_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store {self.dialect.where} is closed")


@contextmanager
def translated(dialect: Dialect) -> Iterator[None]:
    """Turns the driver's errors into errors of `stoker.errors`."""
    try:
        yield
    except _errors(dialect) as exc:
        raise dialect.translate(exc) from exc


def _errors(dialect: Dialect) -> tuple[type[Exception], ...]:
    return (SQLAlchemyError, *dialect.errors)
