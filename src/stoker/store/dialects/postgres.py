"""PostgreSQL: everything that other databases do differently.

Writers exclude each other from the start of their transactions: the statement that begins one updates one row of
`leadership`. So they run one after the other, as with a database that has one writer. Nothing that a transaction read
can have changed when it writes, and no conflict appears at its end. The same row carries the fence: a writer that no
longer leads finds no row. After a connection was lost during a commit, the row shows whether the commit took place.
Readers get a snapshot and never wait.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psycopg
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy import exc as sa_exc
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.pool import QueuePool

from stoker.errors import NotLeading, StokerError, StoreBusy, StoreError
from stoker.store import row_copy, schema
from stoker.store.dialects import postgres_errors, postgres_url
from stoker.store.dialects.postgres_types import DRIVER, PostgresTypes, Storable
from stoker.store.retry import with_retries

log = logging.getLogger(__name__)
T = TypeVar("T")

READERS = 8
"""Largest number of read connections; each is a process of the database server."""
OLDEST = 130000
"""The oldest supported server: 13."""
STATEMENT_SECONDS = 60
IDLE_SECONDS = 5
"""Seconds that the database server waits for this process within a transaction that holds a lock. After that it ends
the transaction, so that a stopped or disconnected process does not block other writers."""
READING_SECONDS = 60
"""The same for readers, who block no one and may have a long list to process."""
_MAKING = 0x53746F6B6572  # "Stoker"
"""The advisory lock for creating or changing the tables."""

_SESSION = """
SET statement_timeout = {statement:d};
SET idle_in_transaction_session_timeout = {idle:d};
SET lock_timeout = {lock:d};
SET standard_conforming_strings = on;
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'
"""
_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_PLAIN = "BEGIN ISOLATION LEVEL READ COMMITTED"
_TURN = "UPDATE leadership SET turn = turn + 1, writer = '%s' WHERE id = 1%s RETURNING epoch, turn"
_LAST = "SELECT epoch, turn, writer FROM leadership WHERE id = 1 FOR UPDATE"
_NO_LIMITS = "SET LOCAL statement_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0"
_TABLES = "SELECT count(*) FROM pg_tables WHERE schemaname = current_schema()"
_READ_ALL = "SELECT count(*), coalesce(sum(length(t::text)), 0) FROM {} t"


class Turn(NamedTuple):
    """One writing transaction."""

    epoch: int
    number: int


class PostgresDialect:
    kind = "postgresql"
    shared = True
    errors: tuple[type[Exception], ...] = (psycopg.Error,)
    insert: Any = staticmethod(insert)

    def __init__(self, url: str, *, busy_timeout: float, epoch: int | None = None) -> None:
        self._conninfo = postgres_url.parsed(url)
        self.where = postgres_url.shown(self._conninfo)
        self.patience = 3 * busy_timeout
        self._lock_ms = max(1, int(busy_timeout * 1000))
        self._epoch = epoch
        self._writer = secrets.token_hex(8)
        self._turn: Turn | None = None

    # -- opening ---------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        return self._apart(_count_tables) > 0

    def create(self, build: Callable[[Connection], None]) -> None:
        def make(connection: Connection) -> None:
            self.lift_time_limits(connection)
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_MAKING})"))
            if not _count_tables(connection):
                build(connection)
                connection.commit()

        self._apart(make)

    def writer(self) -> Engine:
        return self._engine(self._begin_turn, size=1)

    def readers(self) -> Engine:
        return self._engine(lambda driver: _execute(driver, _READ), size=READERS, idle=READING_SECONDS)

    def apart(self) -> Engine:
        return self._engine(lambda driver: _execute(driver, _PLAIN), size=1)

    def check_replaced(self) -> None:
        """Nothing: the statement that begins a transaction fails when the database is gone."""

    def verify(self, engine: Engine) -> None:
        self._apart(self._check_server)

    def _check_server(self, connection: Connection) -> None:
        info = _driver(connection).info
        encoding = info.parameter_status("server_encoding")
        if encoding != "UTF8":
            raise StoreError(
                f"{self.where} keeps text as {encoding}, not as UTF8",
                hint="Create a database with ENCODING 'UTF8' and use that one.",
            )
        if info.server_version < OLDEST:
            raise StoreError(
                f"{self.where} is served by version {info.server_version // 10000}",
                hint=f"Version {OLDEST // 10000} or newer is needed.",
            )
        if connection.execute(text("SELECT current_setting('fsync')")).scalar_one() != "on":
            log.warning("%s does not sync to its disk: a power cut may lose acknowledged changes", self.where)

    def keep_before_migration(self, found: int) -> None:
        """Nothing: a failed migration leaves no trace, and the database server has its own backups."""

    def lift_time_limits(self, connection: Connection) -> None:
        _execute(_driver(connection), _NO_LIMITS)

    # -- transactions ----------------------------------------------------------------------------------------

    def mark(self) -> Turn | None:
        return self._turn

    def committed(self, mark: Any) -> bool:
        epoch, turn, writer = self._apart(_last_turn)
        if writer == self._writer:
            return bool(turn >= mark.number)
        self._check_epoch(epoch)
        if turn <= mark.number:
            return False
        raise StoreError(
            f"the connection to {self.where} was lost while a change was committed, and others have written since",
            hint="Check whether the change took place before repeating it.",
        )

    def _begin_turn(self, driver: psycopg.Connection[Any]) -> None:
        self._turn = None
        fence = "" if self._epoch is None else f" AND epoch = {self._epoch}"
        try:
            cursor = _execute(driver, f"{_PLAIN}; {_TURN % (self._writer, fence)}")
        except psycopg.errors.ReadOnlySqlTransaction:
            driver.close()  # it has become a replica: reconnect to the primary
            raise
        cursor.nextset()
        row = cursor.fetchone()
        if row is None:
            driver.rollback()
            self._check_epoch(None)
            raise postgres_errors.damaged(self.where, "the row that orders its writers is missing")
        self._turn = Turn(*row)

    def _check_epoch(self, found: int | None) -> None:
        if self._epoch is not None and found != self._epoch:
            raise NotLeading(
                f"another server leads on {self.where} now; this one writes nothing more",
                hint="Try again; the server that leads answers.",
            )

    # -- maintenance -----------------------------------------------------------------------------------------

    def transient(self, problem: Exception) -> bool:
        return postgres_errors.transient(problem)

    def translate(self, problem: Exception) -> StokerError:
        if isinstance(problem, sa_exc.TimeoutError):
            return StoreBusy(f"all {READERS} read connections to {self.where} are in use", hint="Try again.")
        return postgres_errors.translate(problem, self.where)

    def check(self, connection: Connection) -> list[str]:
        """Reads every stored value. PostgreSQL itself enforces the references."""
        _execute(_driver(connection), _NO_LIMITS)
        for table in schema.metadata.sorted_tables:
            connection.execute(text(_READ_ALL.format(table.name))).one()
        return []

    def copy(self, target: Path) -> None:
        self._apart(row_copy.to_file, target, begin=f"{_READ}; {_NO_LIMITS}")

    def loaded(self, connection: Connection) -> None:
        """Moves the sequences past the numbers that were added."""
        for table in schema.metadata.sorted_tables:
            counted = table.autoincrement_column
            if counted is not None:
                name = counted.name
                connection.execute(
                    text(
                        f"SELECT setval(pg_get_serial_sequence('{table.name}', '{name}'), "
                        f"greatest((SELECT max({name}) FROM {table.name}), 1), "
                        f"(SELECT max({name}) FROM {table.name}) IS NOT NULL)"
                    )
                )

    # -- connections -----------------------------------------------------------------------------------------

    def _apart(self, work: Callable[..., T], *args: Any, begin: str = _PLAIN) -> T:
        """Runs `work` on a connection of its own, outside the order of writers. Only `work` itself commits."""

        def once() -> T:
            engine = self._engine(lambda driver: _execute(driver, begin), size=1)
            try:
                with engine.connect() as connection:
                    return work(connection, *args)
            finally:
                engine.dispose()

        return with_retries(once, self.transient, self.patience)

    def _engine(
        self, begin: Callable[[psycopg.Connection[Any]], Any], *, size: int, idle: float | None = None
    ) -> Engine:
        engine = create_engine(
            DRIVER,
            creator=lambda: self._connect(IDLE_SECONDS if idle is None else idle),
            poolclass=QueuePool,
            pool_size=size,
            max_overflow=0,
            pool_timeout=30,
            use_native_hstore=False,
        )
        assert isinstance(engine.dialect, PostgresTypes)
        engine.dialect.begin = begin
        return engine

    def _connect(self, idle: float) -> psycopg.Connection[Any]:
        connection = psycopg.connect(**self._conninfo, autocommit=True)
        connection.adapters.register_dumper(str, Storable)
        session = {"statement": STATEMENT_SECONDS * 1000, "idle": int(idle * 1000), "lock": self._lock_ms}
        _execute(connection, _SESSION.format(**session))
        return connection


def _count_tables(connection: Connection) -> int:
    return int(connection.execute(text(_TABLES)).scalar_one())


def _last_turn(connection: Connection) -> tuple[int, int, str]:
    """Waits for an earlier transaction of this process that the database server has not finished yet."""
    epoch, turn, writer = connection.execute(text(_LAST)).one()
    return epoch, turn, writer


def _execute(driver: psycopg.Connection[Any], statements: str) -> psycopg.Cursor[Any]:
    """Several statements in one round trip."""
    return driver.execute(statements.encode(), prepare=False)


def _driver(connection: Connection) -> psycopg.Connection[Any]:
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    return driver
