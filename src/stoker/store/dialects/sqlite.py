"""SQLite: everything that other databases do differently.

WAL, so that readers never wait for the writer; `synchronous=FULL`, so that acknowledged changes survive a power cut;
`BEGIN IMMEDIATE`, so that a transaction that has read can also write without a conflict.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy import exc as sa_exc
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.pool import QueuePool

from stoker.errors import StokerError, StoreBusy, StoreDamaged, StoreError
from stoker.store.dialects import sqlite_errors as errors
from stoker.store.dialects import sqlite_files as files
from stoker.store.dialects.sqlite_errors import damage

READERS = 8
"""Largest number of open read connections; each costs a few descriptors and its page cache."""
VERIFY_SECONDS = 0.5
"""How long opening may look for damage. A table that was started is finished. About 2 s per gigabyte."""
COPY_PAGES = 512
"""Pages that a backup copies at a time: 2 MiB, a few milliseconds of one lock on one page cache."""
WHOLE_CHECK = 64 << 20
"""A file up to this size is verified as a whole on opening; of a larger one the most important tables first."""
_CHECKPOINT_TRIES = 100
_IN_ORDER = ("runs", "attempts", "tasks", "checkpoints", "cursors", "run_records", "run_tags", "events")


class SqliteDialect:
    kind = "sqlite"
    shared = False
    patience = 0.0  # the driver itself waits for a lock
    # The driver decodes SQLite's messages as UTF-8, and messages about a damaged schema quote raw bytes.
    errors: tuple[type[Exception], ...] = (sqlite3.Error, UnicodeDecodeError)
    insert: Any = staticmethod(insert)

    def __init__(self, path: Path, *, busy_timeout: float) -> None:
        self.path = path.expanduser().absolute()
        self.where = str(self.path)
        self._busy_timeout = busy_timeout
        self._identity: tuple[int, int] | None = None
        self._writer: Engine | None = None

    # -- opening ---------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        try:
            problem = files.problem(self.path)
        except FileNotFoundError:
            log = files.wal(self.path)
            if log.exists() and log.stat().st_size:
                raise damage(self.path, "the file is gone, but its write-ahead log is still there") from None
            return False
        except OSError as exc:
            raise errors.of_system(exc, self.path) from exc
        if problem:
            raise damage(self.path, problem)
        return True

    def create(self, build: Callable[[Connection], None]) -> None:
        self._make(build, files.name_once)

    def replace(self, build: Callable[[Connection], None]) -> None:
        """Creates a database in place of the existing one, which no process may have open."""
        self._make(build, Path.replace)

    def _make(self, build: Callable[[Connection], None], install: Callable[[Path, Path], object]) -> None:
        temporary = files.temporary(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            files.make_empty(temporary)
            engine = SqliteDialect(temporary, busy_timeout=self._busy_timeout).writer()
            try:
                with engine.begin() as connection:
                    build(connection)
            finally:
                engine.dispose()
            files.sync(temporary)
            install(temporary, self.path)
            files.sync_name(self.path)
        except OSError as exc:
            raise errors.of_system(exc, self.path) from exc
        except (sqlite3.Error, UnicodeDecodeError, sa_exc.DBAPIError) as problem:
            raise self.translate(problem) from problem
        finally:
            files.forget(temporary)

    def writer(self) -> Engine:
        self._writer = self._engine("BEGIN IMMEDIATE", size=1)
        return self._writer

    def readers(self) -> Engine:
        return self._engine("BEGIN", size=READERS)

    def apart(self) -> Engine:
        raise ValueError(f"{self.where} is not shared; a lock decides which server uses it")

    def check_replaced(self) -> None:
        try:
            found = self.path.stat()
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise damage(self.path, f"the file is gone: {exc.strerror}") from exc
        except OSError as exc:
            raise errors.of_system(exc, self.path) from exc
        identity = (found.st_dev, found.st_ino)
        if self._identity is None:
            self._identity = identity
        if identity != self._identity:
            raise damage(self.path, "the file was replaced while it was open")

    def verify(self, engine: Engine) -> None:
        log = files.read_log(self.path)
        if isinstance(log, str):
            raise damage(self.path, log)
        self.check_replaced()
        with _raw(engine) as connection:
            # A lock that another process holds shows here, not at the first submit.
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            if log is not None:
                valid = _valid_frames(connection)
                after = files.read_log(self.path)
                # With other salts another process has restarted the log since it was read; then it was intact.
                same = isinstance(after, files.Log) and after.salts == log.salts
                if same and valid is not None and log.lost(valid):
                    raise damage(
                        self.path, "its write-ahead log is damaged: acknowledged changes are missing"
                    )
            for line in self._quick_check(connection):
                raise damage(self.path, line)

    def _quick_check(self, connection: sqlite3.Connection) -> Iterator[str]:
        deadline = time.monotonic() + VERIFY_SECONDS
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        try:
            if self.path.stat().st_size <= WHOLE_CHECK:
                yield from _findings(connection.execute("PRAGMA quick_check(1)"))
                return
            there = {
                name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
            for table in _IN_ORDER:
                if table in there and time.monotonic() < deadline:
                    yield from _findings(connection.execute(f"PRAGMA quick_check({table})"))
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
                raise
        finally:
            connection.set_progress_handler(None, 0)

    def mark(self) -> None:
        """None: a commit that raises has not taken place, because only this process writes the log."""

    def committed(self, mark: Any) -> bool:
        return False

    # -- maintenance -----------------------------------------------------------------------------------------

    def check(self, connection: Connection) -> list[str]:
        raw = _driver(connection)
        found = list(_findings(raw.execute("PRAGMA integrity_check")))
        for table, row, parent, _ in raw.execute("PRAGMA foreign_key_check").fetchmany(20):
            found.append(f"{table} row {row} refers to a row of {parent} that is not there")
        return found

    def copy(self, target: Path) -> None:
        target = target.expanduser().absolute()
        temporary = files.temporary(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            files.make_empty(temporary)
            self._copy_pages(temporary)
            if problem := _problem_of_copy(temporary):
                raise damage(self.path, f"the copy {target} made of it fails its check: {problem}")
            files.sync(temporary)
            temporary.replace(target)
            files.sync_name(target)
        except OSError as exc:
            raise errors.of_system(exc, target) from exc
        except self.errors as exc:
            raise errors.translate(exc, target) from exc
        finally:
            files.forget(temporary)

    def _copy_pages(self, temporary: Path) -> None:
        with self._source() as source, contextlib.closing(sqlite3.connect(temporary)) as copy:
            # An open read transaction makes the copy show one moment: writers go on and never make it start over.
            source.execute("BEGIN")
            source.execute("SELECT count(*) FROM sqlite_master").fetchone()
            source.backup(copy, pages=COPY_PAGES, sleep=0)
            source.execute("ROLLBACK")

    @contextlib.contextmanager
    def _source(self) -> Iterator[sqlite3.Connection]:
        """A connection for copying. Where the file was deleted or replaced, the writer's connection, which still has
        the old file open: it holds everything until this process ends. Writing has stopped, so that connection is
        free."""
        try:
            self.check_replaced()
        except StoreDamaged:
            if self._writer is None:
                raise
            with _raw(self._writer) as open_still:
                yield open_still
            return
        with contextlib.closing(self._connect()) as connection:
            yield connection

    def keep_before_migration(self, found: int) -> None:
        self.copy(Path(f"{self.where}.schema-{found}"))

    def lift_time_limits(self, connection: Connection) -> None:
        """Nothing: there are none."""

    def loaded(self, connection: Connection) -> None:
        """Nothing: numbers continue after the highest one."""

    # -- errors ----------------------------------------------------------------------------------------------

    def transient(self, problem: Exception) -> bool:
        original = problem.orig if isinstance(problem, sa_exc.DBAPIError) else problem
        return errors.is_busy(original)

    def translate(self, problem: Exception) -> StokerError:
        if isinstance(problem, sa_exc.TimeoutError):
            return StoreBusy(f"all {READERS} read connections to {self.where} are in use", hint="Try again.")
        original = problem.orig if isinstance(problem, sa_exc.DBAPIError) else problem
        if isinstance(original, self.errors):
            return errors.translate(original, self.path)
        return StoreError(f"{self.where}: {problem}")

    # -- connections -----------------------------------------------------------------------------------------

    def _engine(self, begin: str, *, size: int) -> Engine:
        reads_only = begin == "BEGIN"
        engine = create_engine(
            "sqlite+pysqlite://",
            creator=lambda: self._connect(query_only=reads_only),
            poolclass=QueuePool,
            pool_size=size,
            max_overflow=0,
            pool_timeout=30,
        )

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            _driver(connection).execute(begin)

        return engine

    def _connect(self, *, query_only: bool = True) -> sqlite3.Connection:
        connection = sqlite3.connect(
            # Without "rw", SQLite would create an empty database where the file was deleted.
            f"file:{quote(str(self.path))}?mode=rw",
            uri=True,
            timeout=self._busy_timeout,
            isolation_level=None,  # BEGIN is sent explicitly
            check_same_thread=False,  # the pool hands a connection to one thread at a time
            cached_statements=256,
        )
        try:
            self._configure(connection, query_only)
        except BaseException:  # raised again; only closes the handle
            connection.close()
            raise
        return connection

    def _configure(self, connection: sqlite3.Connection, query_only: bool) -> None:
        mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise StoreError(
                f"{self.path} cannot be kept on this file system: it does not support a write-ahead log",
                hint="Put STOKER_HOME on a local disk.",
            )
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA fullfsync=ON")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA temp_store=MEMORY")
        connection.execute(f"PRAGMA cache_size=-{8 << 10 if query_only else 32 << 10}")
        connection.execute(f"PRAGMA journal_size_limit={64 << 20}")
        connection.execute(f"PRAGMA query_only={int(query_only)}")


def put_in_place(copy: Path, path: Path) -> Path | None:
    """Makes a copy the database at `path`, which no process may have open. The old files move aside together, log
    included: SQLite would apply a log to a database that it does not belong to. Returns their new name. Raises
    StoreDamaged when the copy fails its check."""
    dialect = SqliteDialect(path, busy_timeout=1.0)
    path = dialect.path
    temporary = files.temporary(path)
    aside: Path | None = None
    try:
        files.make_empty(temporary)
        shutil.copyfile(copy, temporary)
        if problem := _problem_of_copy(temporary):
            raise StoreDamaged(f"the copy {copy} fails its check: {problem}", hint="Choose another copy.")
        files.sync(temporary)
        aside = files.move_aside(path)
        temporary.replace(path)
        files.sync_name(path)
    except OSError as error:
        raise errors.of_system(error, path) from error
    except dialect.errors as error:
        raise errors.translate(error, Path(copy)) from error
    finally:
        files.forget(temporary)
    return aside


def _problem_of_copy(path: Path) -> str | None:
    if problem := files.problem(path):
        return problem
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return next(_findings(connection.execute("PRAGMA integrity_check(1)")), None)


def _valid_frames(connection: sqlite3.Connection) -> int | None:
    """The number of frames of the write-ahead log that SQLite accepts. None: other processes use it all the time."""
    for _ in range(_CHECKPOINT_TRIES):
        busy, frames, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if frames >= 0 or not busy:
            return int(frames)
        time.sleep(0.01)  # another process checkpoints it at this moment, so SQLite gives no answer
    return None


def _findings(cursor: sqlite3.Cursor) -> Iterator[str]:
    for (line,) in cursor:
        if line != "ok":
            yield str(line)


@contextlib.contextmanager
def _raw(engine: Engine) -> Iterator[sqlite3.Connection]:
    proxied = engine.raw_connection()
    try:
        driver = proxied.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        yield driver
    finally:
        proxied.close()


def _driver(connection: Connection) -> sqlite3.Connection:
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver
