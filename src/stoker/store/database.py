"""Connections and transactions, the same for every database."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from stoker.errors import StoreBusy, StoreDamaged, StoreError
from stoker.store.codec import RESTORE_HINT
from stoker.store.dialect import Dialect

WRITER_WAIT = 60.0
"""Seconds a writer waits for the others of this process. Transactions take milliseconds, so more than this
means a hanging disk."""
TRIES = 3
"""How often the start of a transaction is tried while another process holds the database."""


class Database:
    """One writer, several readers. Safe from any thread.

    `write()` holds the process-wide lock and a transaction that excludes other writers from its start; it is
    committed when the block ends and rolled back when the block raises. `read()` is a snapshot. Only errors
    of `stoker.errors` leave the blocks for anything the database does wrong.
    """

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.damaged: str | None = None
        """Why nothing is written any more; None while all is well."""
        self._closed = False
        self._lock = threading.Lock()
        self._errors: tuple[type[Exception], ...] = (SQLAlchemyError, *dialect.errors)
        self.writer = dialect.writer()
        self.readers = dialect.readers()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        self._ensure_open()
        try:
            with self.readers.connect() as connection:
                yield connection
        except self._errors as exc:
            self._fail(exc)
        except StoreDamaged as exc:
            self._remember(exc)
            raise

    @contextmanager
    def write(self) -> Iterator[Connection]:
        self._ensure_open()
        if self.damaged is not None:
            raise StoreDamaged(f"{self.damaged}; nothing more is written", hint=RESTORE_HINT)
        if not self._lock.acquire(timeout=WRITER_WAIT):
            raise StoreBusy(f"writing to {self.dialect.where} has been stuck for {WRITER_WAIT:g} s")
        try:
            self.dialect.still_there()
            connection = self._begin()
            try:
                yield connection
                connection.commit()
            finally:
                connection.close()
        except self._errors as exc:
            self._fail(exc)
        except StoreDamaged as exc:
            self._remember(exc)
            raise
        finally:
            self._lock.release()

    def verify(self) -> None:
        try:
            self.dialect.verify(self.writer)
        except self._errors as exc:
            self._fail(exc)

    def check(self) -> list[str]:
        try:
            with self.read() as connection:
                found = self.dialect.check(connection)
        except StoreDamaged as exc:
            return [exc.message]
        if found and self.damaged is None:
            self.damaged = f"the database {self.dialect.where} is damaged: {found[0]}"
        return found

    def copy(self, target: Path) -> None:
        self._ensure_open()
        try:
            self.dialect.copy(target)
        except StoreDamaged:
            self.check()  # the copy may have been spoilt on its own disk; only our damage stops writing
            raise
        except self._errors as exc:
            self._fail(exc)

    def close(self) -> None:
        self._closed = True
        with self._lock:
            self.readers.dispose()
            self.writer.dispose()

    def _begin(self) -> Connection:
        for left in reversed(range(TRIES)):
            connection = self.writer.connect()
            try:
                connection.begin()
            except self._errors as exc:
                connection.close()
                if left and isinstance(self.dialect.translate(exc), StoreBusy):
                    continue
                raise
            return connection
        raise AssertionError("unreachable")

    def _ensure_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store {self.dialect.where} is closed")

    def _fail(self, exc: Exception) -> NoReturn:
        translated = self.dialect.translate(exc)
        if isinstance(translated, StoreDamaged):
            self._remember(translated)
        raise translated from exc

    def _remember(self, exc: StoreDamaged) -> None:
        if self.damaged is None:
            self.damaged = exc.message
