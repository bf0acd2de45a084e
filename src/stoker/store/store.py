"""The store: everything Stoker knows, as one class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection

from stoker.errors import NotFound
from stoker.settings import Home
from stoker.store import clusters, home_contents, metrics, migrate, queries, submissions, trash
from stoker.store.database import Database, translated
from stoker.store.dialects.base import dialect_for, is_shared
from stoker.store.metrics import MetricPoint
from stoker.store.mutations import Changes
from stoker.store.rows import (
    AttemptRow,
    Change,
    CheckpointRow,
    ClusterRow,
    EventRow,
    Json,
    NewRun,
    PartRow,
    Roots,
    RunFilter,
    RunRow,
    RunSize,
    TaskRow,
    TransferRow,
)


class Store:
    """What users asked for and what happened, in one database.

    Every method is synchronous, may be called from any thread, and is one transaction. A write is synced to disk when
    it returns and leaves no trace when it raises. A read sees one consistent state and never waits for a writer.
    After a crash everything acknowledged is there, and nothing is there in part. One process should have a store open
    for writing; a second one waits or gets an error.

    Raises only `stoker.errors` (and ValueError for a mistake of the caller). StoreBusy may be tried again, DiskFull
    too once there is room. Once the database has shown damage, `damaged` describes it. Then reads go on as far as
    possible, and every write raises StoreDamaged.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._changes = Changes(database.dialect)

    @classmethod
    def open(
        cls,
        url_or_path: str | Path,
        *,
        create: bool = True,
        busy_timeout: float = 5.0,
        epoch: int | None = None,
    ) -> Self:
        """Checks the database, migrates its schema and opens it. `busy_timeout`: seconds to wait, a few times, for a
        lock of another process or for an unreachable database. `epoch`: the one that LeaderLease gave to the leader;
        every write raises NotLeading once there is a newer one."""
        dialect = dialect_for(url_or_path, busy_timeout=busy_timeout, epoch=epoch)
        with translated(dialect):
            if not dialect.exists():
                if not create:
                    raise NotFound(
                        f"no database at {dialect.where}", hint="stoker backup restore brings one back."
                    )
                dialect.create(migrate.create)
        database = Database(dialect)
        try:
            database.verify()
            migrate.bring_up_to_date(database)
        except BaseException:  # raised again; only closes the files
            database.close()
            raise
        return cls(database)

    @classmethod
    def of_home(cls, home: Home, url_or_path: str | Path, *, epoch: int | None = None) -> Self:
        """The database of a home, created where the home is new. Raises StoreLost when it is gone or empty although
        the home holds data of runs: a new database would treat that data as garbage."""
        shared = is_shared(url_or_path)
        try:
            store = cls.open(url_or_path, create=False, epoch=epoch)
        except NotFound:
            found = home_contents.of_home(home)
            if found.anything:
                where = dialect_for(url_or_path).where
                raise home_contents.lost(home, where, found, shared=shared, empty=False) from None
            return cls.open(url_or_path, epoch=epoch)
        if store.is_empty() and (found := home_contents.of_home(home)).of_runs:
            store.close()
            raise home_contents.lost(home, store.where, found, shared=shared, empty=True)
        return store

    @property
    def damaged(self) -> str | None:
        return self._database.damaged

    @property
    def kind(self) -> str:
        return self._database.dialect.kind

    @property
    def where(self) -> str:
        return self._database.dialect.where

    def when_fenced(self, call: Callable[[], None]) -> None:
        """`call` runs when another server has taken over, in the thread that wanted to write."""
        self._database.on_fenced = call

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what users ask for ----------------------------------------------------------------------------------

    def submit(self, new: NewRun, *, now: float) -> tuple[RunRow, bool]:
        """The run and whether it is new. The same key gives the same run; with another fingerprint it is a Conflict."""
        return self._database.write(submissions.submit, new, now)

    def set_desired(self, run_id: str, desired: str, now: float, *, by: str) -> RunRow:
        """run | stop | kill | suspend. A terminal run does not change, and a weaker wish never replaces a stronger
        one: kill stays kill after stop, stop stays stop after suspend."""
        return self._database.write(submissions.set_desired, run_id, desired, now, by)

    def resume(self, run_id: str, *, key: str, now: float, job: Json | None = None) -> tuple[RunRow, bool]:
        """Queues a terminal or suspended run again; Conflict in any other state. The same key again changes nothing
        (False)."""
        return self._database.write(submissions.resume, run_id, key, now, job)

    # -- the trash -------------------------------------------------------------------------------------------

    def remove(self, run_id: str, *, now: float, by: str) -> RunRow:
        """Puts an ended run into the trash: it is in no list and no count any more, and keeps all it has. Conflict in
        any other state. Again it changes nothing."""
        return self._database.write(trash.remove, run_id, now, by)

    def restore(self, run_id: str, *, now: float, by: str) -> RunRow:
        """Takes a run out of the trash. Of one that is not in it nothing changes."""
        return self._database.write(trash.restore, run_id, now, by)

    def expired(self, before: float) -> tuple[list[str], list[str]]:
        """The runs that have been in the trash since before this time; and of them those that must wait, because an
        engine still holds something of them."""
        return self._database.read(trash.expired, before)

    def purge(self, run_id: str, before: float) -> set[str] | None:
        """Deletes all rows of a run that `expired` names, except the one that keeps its id and its key taken. Returns
        the trees that it referred to, without its code, which an upload under way may rely on. None: it must stay, it was taken out meanwhile for example."""
        return self._database.write(trash.purge, run_id, before)

    def purged(self, run_ids: Sequence[str]) -> set[str]:
        """Those of these runs that the trash was emptied of."""
        return self._database.read(trash.purged, run_ids)

    def sizes(self, run_ids: Sequence[str] | None = None) -> list[RunSize]:
        """What is stored of these runs; None: of every run that is not in the trash."""
        return self._database.read(trash.sizes, run_ids)

    # -- what happened ---------------------------------------------------------------------------------------

    def apply(self, changes: Sequence[Change]) -> None:
        """Applies all or none, as if one after the other. Raises ValueError for an unknown column, NotFound for an
        update of a missing row, Conflict for adding an existing one."""
        if not changes:
            return
        learnt = self._database.write(self._changes.apply, changes)
        self._changes.metrics.remember(learnt)

    # -- reading ---------------------------------------------------------------------------------------------

    def run(self, run_id: str) -> RunRow:
        return self._database.read(queries.run, run_id)

    def resolve(self, ref: str, project: str | None = None, *, trash: bool = False) -> RunRow:
        """The run with this id, else the newest of this name, else the only one whose id starts with it. `trash`: among
        the removed runs, instead of the others."""
        return self._database.read(queries.resolve, ref, project, trash)

    def runs(self, wanted: RunFilter | None = None, *, records: bool = True) -> list[RunRow]:
        """Newest first. Without `records` the rows' `record` is empty, and much less is read."""
        return self._database.read(queries.list_runs, wanted or RunFilter(), records=records)

    def live(self, *, records: bool = True) -> list[RunRow]:
        """Queued, starting, running or stopping, oldest first."""
        return self._database.read(queries.live, records=records)

    def counts(self) -> dict[str, int]:
        """By state, without the trash."""
        return self._database.read(queries.counts)

    def total(self) -> int:
        """All runs it has had, removed ones too."""
        return self._database.read(queries.total)

    def is_empty(self) -> bool:
        """Whether it never had a run."""
        return self._database.read(queries.is_empty)

    def unfinished_attempts(self) -> list[AttemptRow]:
        """Attempts that have not ended, or have ended and are not yet removed from their engine."""
        return self._database.read(queries.unfinished_attempts)

    def attempts(self, run_id: str) -> list[AttemptRow]:
        return self._database.read(queries.rows_of, AttemptRow, queries.ATTEMPTS_OF, run=run_id)

    def attempt(self, run_id: str, number: int) -> AttemptRow:
        return self._database.read(queries.attempt, run_id, number)

    def latest_attempts(self, run_ids: Iterable[str]) -> dict[str, AttemptRow]:
        """By run. Runs without an attempt are left out."""
        return self._database.read(queries.latest_attempts, list(run_ids))

    def tasks(self, run_id: str, attempt: int) -> list[TaskRow]:
        return self._database.read(queries.rows_of, TaskRow, queries.TASKS_OF, run=run_id, attempt=attempt)

    def checkpoints(self, run_id: str, kept_only: bool = False) -> list[CheckpointRow]:
        """Oldest first."""
        statement = queries.KEPT_CHECKPOINTS_OF if kept_only else queries.CHECKPOINTS_OF
        return self._database.read(queries.rows_of, CheckpointRow, statement, run=run_id)

    def checkpoint(self, checkpoint_id: str) -> CheckpointRow:
        return self._database.read(queries.checkpoint, checkpoint_id)

    def checkpoint_parts(self, run_id: str, attempt: int) -> list[PartRow]:
        """Parts of the attempt's checkpoints that wait for other tasks, and of its newest complete ones."""
        return self._database.read(queries.rows_of, PartRow, queries.PARTS_OF, run=run_id, attempt=attempt)

    def checkpoint_transfers(self, run_id: str, attempt: int) -> list[TransferRow]:
        """Checkpoints of the attempt whose bytes are on their way, each task's in the order of its journal."""
        return self._database.read(
            queries.rows_of, TransferRow, queries.TRANSFERS_OF, run=run_id, attempt=attempt
        )

    def events(self, run_id: str) -> list[EventRow]:
        return self._database.read(queries.rows_of, EventRow, queries.EVENTS_OF, run=run_id)

    def cursors(self, run_id: str, attempt: int) -> dict[tuple[str, str], int]:
        """(task, file) -> offset."""
        return self._database.read(queries.cursors_of, run_id, attempt)

    def metric_keys(self, run_id: str) -> list[dict[str, Any]]:
        """key, count, last, min, max, last_step; by key. NaN counts, but is neither lowest nor highest."""
        return self._database.read(metrics.summary, run_id)

    def metric_points(self, run_id: str, key: str, max_points: int | None = None) -> list[MetricPoint]:
        """(step, value, t, attempt) by step, with the newest attempt's value of each. A thinned curve keeps the
        first, the last and every extreme."""
        return self._database.read(metrics.points, run_id, key, max_points)

    def metric_names(self, run_id: str) -> list[str]:
        """The keys alone: `metric_keys` reads all their points."""
        return sorted(self._database.read(metrics.keys_of, run_id))

    def recent_metrics(self, run_id: str, keys: Sequence[str], limit: int) -> dict[str, list[MetricPoint]]:
        """The last points of the newest attempt for each existing key, by step."""
        return self._database.read(metrics.recent, run_id, keys, limit)

    def last_values(self, run_ids: Sequence[str], key: str) -> dict[str, float]:
        """The newest value of one key, by run. Runs without it are left out."""
        return self._database.read(metrics.last_of, run_ids, key)

    def latest_metrics(self, run_id: str) -> dict[str, float]:
        """The newest value of each key."""
        return self._database.read(metrics.latest, run_id)

    # -- clusters --------------------------------------------------------------------------------------------

    def clusters(self) -> list[ClusterRow]:
        return self._database.read(clusters.every)

    def put_cluster(self, name: str, config: Json, now: float) -> None:
        """Adds the cluster, or replaces its configuration."""
        self._database.write(clusters.put, name, config, now)

    def remove_cluster(self, name: str) -> None:
        """Raises NotFound, with the existing names, for an unknown one."""
        self._database.write(clusters.remove, name)

    # -- maintenance -----------------------------------------------------------------------------------------

    def blob_roots(self) -> set[str]:
        """Every tree that must be kept: code, kept checkpoints and parts of such, outputs."""
        return self._database.read(_digests, queries.ROOTS)

    def roots(self) -> Roots:
        """The same, by what they are."""
        return self._database.read(trash.roots)

    def schema_version(self) -> int:
        return self._database.read(migrate.version)

    def check(self) -> list[str]:
        """Reads everything and describes each fault. A fault makes the store refuse writes."""
        return self._database.check()

    def backup(self, path: str | Path) -> None:
        """Makes a consistent copy, checked and synced, while others write. An existing file is replaced only by a good
        copy."""
        self._database.copy(Path(path))

    def missing_runs(self, ledger_lines: Iterable[str | bytes | Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The acknowledged runs that are not in the database, from the lines of a ledger."""
        acknowledged = home_contents.acknowledged(ledger_lines)
        known = self._database.read(queries.known_ids, list(acknowledged))
        return [entry for run_id, entry in acknowledged.items() if run_id not in known]


def _digests(connection: Connection, statement: Any) -> set[str]:
    return set(connection.execute(statement).scalars())
