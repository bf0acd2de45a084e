"""SQLite: everything about it that another database would do differently.

WAL, so that readers never wait for the writer; `synchronous=FULL`, so that what was acknowledged survives a
power cut; `BEGIN IMMEDIATE`, so that a transaction that read may write without finding that another got there
first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy import exc as sa_exc
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.pool import QueuePool

from stoker.errors import Conflict, DiskFull, StokerError, StoreBusy, StoreDamaged, StoreError
from stoker.store import sqlite_files as files
from stoker.store.codec import RESTORE_HINT

READERS = 8
"""Read connections kept open at most; each costs a few descriptors and its page cache."""
VERIFY_SECONDS = 0.5
"""How long opening may look for damage; a table that was begun is finished. About 2 s per gigabyte."""
COPY_PAGES = 512
"""Pages copied at a time by a backup: 2 MiB, a few milliseconds of one lock on one page cache."""
WHOLE_CHECK = 64 << 20
"""Up to this size the whole file is verified on opening, beyond it the tables that matter most first."""
FEW_BYTES = 1 << 20
"""With less than this free an I/O error is taken for a full disk."""

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_CHECKPOINT_TRIES = 100
_IN_ORDER = ("runs", "attempts", "tasks", "checkpoints", "cursors", "run_records", "run_tags", "events")


class SqliteDialect:
    kind = "sqlite"
    shared = False
    patience = 0.0  # the driver waits, each time it is tried
    # The driver takes SQLite's messages for UTF-8, and those about a damaged schema quote what they found.
    errors: tuple[type[Exception], ...] = (sqlite3.Error, UnicodeDecodeError)
    insert: Any = staticmethod(insert)

    def __init__(self, path: Path, *, busy_timeout: float) -> None:
        self.path = path.expanduser().absolute()
        self.where = str(self.path)
        self._busy_timeout = busy_timeout
        self._identity: tuple[int, int] | None = None

    # -- opening ---------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        try:
            problem = files.problem(self.path)
        except FileNotFoundError:
            log = files.wal(self.path)
            if log.exists() and log.stat().st_size:
                raise self._damage("the file is gone, but its write-ahead log is still there") from None
            return False
        except OSError as exc:
            raise self._os_error(exc) from exc
        if problem:
            raise self._damage(problem)
        return True

    def create(self, build: Callable[[Connection], None]) -> None:
        self._make(build, files.name_once)

    def replace(self, build: Callable[[Connection], None]) -> None:
        """Make one in place of what is there, which nobody may have open."""
        self._make(build, Path.replace)

    def _make(self, build: Callable[[Connection], None], give_name: Callable[[Path, Path], object]) -> None:
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
            give_name(temporary, self.path)
            files.sync_name(self.path)
        except OSError as exc:
            raise self._os_error(exc) from exc
        except (sqlite3.Error, UnicodeDecodeError, sa_exc.DBAPIError) as problem:
            raise self.translate(problem) from problem
        finally:
            files.forget(temporary)

    def writer(self) -> Engine:
        return self._engine("BEGIN IMMEDIATE", size=1)

    def readers(self) -> Engine:
        return self._engine("BEGIN", size=READERS)

    def apart(self) -> Engine:
        raise ValueError(f"{self.where} is not shared; its lock decides who may use it")

    def still_there(self) -> None:
        try:
            found = self.path.stat()
        except OSError as exc:
            raise self._damage(f"the file is gone: {exc.strerror}") from exc
        identity = (found.st_dev, found.st_ino)
        if self._identity is None:
            self._identity = identity
        if identity != self._identity:
            raise self._damage("the file was replaced while it was open")

    def verify(self, engine: Engine) -> None:
        log = files.read_log(self.path)
        if isinstance(log, str):
            raise self._damage(log)
        self.still_there()
        with _raw(engine) as connection:
            # A lock that somebody holds shows here, not at the first submit.
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            if log is not None:
                valid = _valid_frames(connection)
                after = files.read_log(self.path)
                # Other salts: somebody else has begun the log anew since we read it; then it was whole.
                same = isinstance(after, files.Log) and after.salts == log.salts
                if same and valid is not None and log.lost(valid):
                    raise self._damage("its write-ahead log is damaged: acknowledged changes are missing")
            for line in self._quick_check(connection):
                raise self._damage(line)

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
        """A commit that raises has not taken place: the log decides, and we alone write it."""

    def committed(self, mark: Any) -> bool:
        return False

    # -- looking after it ------------------------------------------------------------------------------------

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
                raise self._damage(f"the copy {target} made of it fails its check: {problem}")
            files.sync(temporary)
            temporary.replace(target)
            files.sync_name(target)
        except OSError as exc:
            raise self._os_error(exc, target) from exc
        except self.errors as exc:
            raise self._translate_driver(exc, target) from exc
        finally:
            files.forget(temporary)

    def _copy_pages(self, temporary: Path) -> None:
        with (
            contextlib.closing(self._connect()) as source,
            contextlib.closing(sqlite3.connect(temporary)) as copy,
        ):
            # With a read transaction open the copy is of one moment: writers go on and never make it start over.
            source.execute("BEGIN")
            source.execute("SELECT count(*) FROM sqlite_master").fetchone()
            source.backup(copy, pages=COPY_PAGES, sleep=0)
            source.execute("ROLLBACK")

    def keep_before_migration(self, found: int) -> None:
        self.copy(Path(f"{self.where}.schema-{found}"))

    def unhurried(self, connection: Connection) -> None:
        """It always is."""

    def loaded(self, connection: Connection) -> None:
        """It counts on from the highest number."""

    # -- errors ----------------------------------------------------------------------------------------------

    def transient(self, problem: Exception) -> bool:
        original = problem.orig if isinstance(problem, sa_exc.DBAPIError) else problem
        return _primary_code(original) in _BUSY

    def translate(self, problem: Exception) -> StokerError:
        if isinstance(problem, sa_exc.TimeoutError):
            return StoreBusy(f"all {READERS} read connections to {self.where} are in use", hint="Try again.")
        original = problem.orig if isinstance(problem, sa_exc.DBAPIError) else problem
        if isinstance(original, self.errors):
            return self._translate_driver(original, self.path)
        return StoreError(f"{self.where}: {problem}")

    def _translate_driver(self, error: BaseException, path: Path) -> StokerError:
        primary = _primary_code(error)
        if primary in _BUSY:
            return StoreBusy(
                f"{path} is locked by another process", hint="Try again; only one server may use a home."
            )
        if primary == sqlite3.SQLITE_CONSTRAINT:
            return Conflict(f"the database refused a change: {error}")
        io = primary in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
        if primary == sqlite3.SQLITE_FULL or (io and _free(path)[1] < FEW_BYTES):
            return _disk_full(path)
        if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            return StoreError(
                f"cannot write to {path}: it is read-only", hint=f"Make {path.parent} writable."
            )
        if primary == sqlite3.SQLITE_CANTOPEN:
            return StoreError(f"cannot open {path}", hint=f"Check that {path.parent} exists and is writable.")
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR):
            return self._damage(str(error), path)
        # Without a code: text that is not UTF-8. The schema was of the right version, so nothing can be missing.
        if "decode" in str(error) or "no such" in str(error):
            return self._damage(str(error), path)
        return StoreError(f"{path}: {error}")

    def _os_error(self, error: OSError, path: Path | None = None) -> StoreError:
        path = path or self.path
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _disk_full(path)
        if error.errno == errno.EIO:
            return self._damage(str(error), path)
        named = error.filename or path
        return StoreError(
            f"cannot use {named}: {error.strerror}", hint=f"Check that {path.parent} is writable."
        )

    def _damage(self, what: str, path: Path | None = None) -> StoreDamaged:
        return StoreDamaged(f"the database {path or self.path} is damaged: {what}", hint=RESTORE_HINT)

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
            self.path,
            timeout=self._busy_timeout,
            isolation_level=None,  # we say BEGIN ourselves
            check_same_thread=False,  # the pool hands a connection to one thread at a time
            cached_statements=256,
        )
        try:
            self._configure(connection, query_only)
        except BaseException:  # raised again: only the handle must not stay open
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
    """Make a copy the database at `path`, which nobody may have open. What was there moves aside as a whole,
    log included (a log beside a database it does not belong to would be played into it), and its new name is
    returned. Raises StoreDamaged when the copy fails its check."""
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
        raise dialect._os_error(error) from error
    except dialect.errors as error:
        raise dialect._translate_driver(error, Path(copy)) from error
    finally:
        files.forget(temporary)
    return aside


def _problem_of_copy(path: Path) -> str | None:
    if problem := files.problem(path):
        return problem
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return next(_findings(connection.execute("PRAGMA integrity_check(1)")), None)


def _valid_frames(connection: sqlite3.Connection) -> int | None:
    """How many frames of the write-ahead log SQLite accepts. None: others are at it all the time; then they use it."""
    for _ in range(_CHECKPOINT_TRIES):
        busy, frames, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if frames >= 0 or not busy:
            return int(frames)
        time.sleep(0.01)  # somebody else moves pages out of it at this moment, and there is no answer
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


def _primary_code(error: BaseException | None) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _driver(connection: Connection) -> sqlite3.Connection:
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


def _free(path: Path) -> tuple[Path, int]:
    """The nearest directory that exists, and how many bytes are left there for us."""
    for directory in path.parents:
        with contextlib.suppress(OSError):
            found = os.statvfs(directory)
            return directory, found.f_bavail * found.f_frsize
    return path.parent, FEW_BYTES


def _disk_full(path: Path) -> DiskFull:
    directory, free = _free(path)
    mount = directory
    while not mount.is_mount() and mount != mount.parent:
        mount = mount.parent
    return DiskFull(
        f"no space left on {mount} for {path}: {free} bytes free",
        hint="Free some space; nothing that was acknowledged is lost, and work goes on as soon as there is room.",
        details={"file_system": str(mount), "free": free, "path": str(path)},
    )
