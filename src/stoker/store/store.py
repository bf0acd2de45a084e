"""The store: everything Stoker knows, behind one class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection

from stoker.errors import NotFound
from stoker.settings import Home
from stoker.store import clusters, home_contents, metrics, migrate, queries, submissions
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
    RunFilter,
    RunRow,
    TaskRow,
)


class Store:
    """What users asked for and what happened, in one database.

    Every method is synchronous, may be called from any thread, and is one transaction: a write has been
    synced to disk when it returns and has left no trace when it raises; a read sees one consistent state and
    never waits for a writer. After a crash at any point everything acknowledged is there and nothing is there
    in part. One process should have a store open for writing; a second one is kept out, not confused.

    Raises only `stoker.errors` (and ValueError for a caller's mistake): StoreBusy may be tried again, DiskFull
    too once there is room. Once the database has shown damage, `damaged` says how, reads go on as far as they
    can, and every write raises StoreDamaged.
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
        """Check it, bring its schema up to date and use it. `busy_timeout`: seconds to wait, a few times, for
        another process to let go of it, or for a database that is away. `epoch`: what a Seat gave to who leads;
        every write is refused with NotLeading once there is a newer one."""
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
        except BaseException:  # raised again: only the files must not stay open
            database.close()
            raise
        return cls(database)

    @classmethod
    def of_home(cls, home: Home, url_or_path: str | Path, *, epoch: int | None = None) -> Self:
        """The database of a home, made where the home is new. StoreLost when it is gone or has no runs in it, and the
        home holds what is left of some: a new one beside that would take it for garbage."""
        shared = is_shared(url_or_path)
        try:
            store = cls.open(url_or_path, create=False, epoch=epoch)
        except NotFound:
            found = home_contents.of_home(home)
            if found.anything:
                where = dialect_for(url_or_path).where
                raise home_contents.lost(home, where, found, shared=shared, empty=False) from None
            return cls.open(url_or_path, epoch=epoch)
        if not any(store.counts().values()) and (found := home_contents.of_home(home)).of_runs:
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
        """Called, in the thread that meant to write, when another server has taken over."""
        self._database.on_fenced = call

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what people ask for ---------------------------------------------------------------------------------

    def submit(self, new: NewRun, *, now: float) -> tuple[RunRow, bool]:
        """The run and whether it is new. The same key again gives the same run; with another fingerprint
        Conflict."""
        return self._database.write(submissions.submit, new, now)

    def submit_many(self, new: Sequence[NewRun], *, now: float) -> list[tuple[RunRow, bool]]:
        """All or none of them, in this order."""
        return self._database.write(submissions.submit_many, new, now)

    def set_desired(self, run_id: str, desired: str, now: float, *, by: str) -> RunRow:
        """run | stop | kill | suspend. A terminal run stays as it is, and a wish never weakens an earlier
        one: stop after kill stays kill, suspend after stop stays stop."""
        return self._database.write(submissions.set_desired, run_id, desired, now, by)

    def resume(self, run_id: str, *, key: str, now: float, job: Json | None = None) -> tuple[RunRow, bool]:
        """Queue a terminal or suspended run again; Conflict in any other state. The same key again does
        nothing (False)."""
        return self._database.write(submissions.resume, run_id, key, now, job)

    # -- what happened ---------------------------------------------------------------------------------------

    def apply(self, changes: Sequence[Change]) -> None:
        """All or nothing, as if one after the other. ValueError for an unknown column, NotFound for an update
        of what is not there, Conflict for adding what is there already."""
        if not changes:
            return
        learnt = self._database.write(self._changes.apply, changes)
        self._changes.metrics.remember(learnt)

    # -- reading ---------------------------------------------------------------------------------------------

    def run(self, run_id: str) -> RunRow:
        return self._database.read(queries.run, run_id)

    def resolve(self, ref: str, project: str | None = None) -> RunRow:
        """An id, else the newest run of that name, else the only id that begins so."""
        return self._database.read(queries.resolve, ref, project)

    def runs(self, wanted: RunFilter | None = None, *, records: bool = True) -> list[RunRow]:
        """Newest first. Without `records` the rows' `record` is empty, and much less is read."""
        return self._database.read(queries.list_runs, wanted or RunFilter(), records=records)

    def live(self, *, records: bool = True) -> list[RunRow]:
        """Queued, starting, running or stopping, oldest first."""
        return self._database.read(queries.live, records=records)

    def counts(self) -> dict[str, int]:
        return self._database.read(queries.counts)

    def unfinished_attempts(self) -> list[AttemptRow]:
        """Not ended, or ended and not yet removed from its engine."""
        return self._database.read(queries.unfinished_attempts)

    def attempts(self, run_id: str) -> list[AttemptRow]:
        return self._database.read(queries.attempts_of, run_id)

    def attempt(self, run_id: str, number: int) -> AttemptRow:
        return self._database.read(queries.attempt, run_id, number)

    def latest_attempts(self, run_ids: Iterable[str]) -> dict[str, AttemptRow]:
        """Runs without an attempt are left out."""
        return self._database.read(queries.latest_attempts, list(run_ids))

    def tasks(self, run_id: str, attempt: int) -> list[TaskRow]:
        return self._database.read(queries.tasks_of, run_id, attempt)

    def checkpoints(self, run_id: str, kept_only: bool = False) -> list[CheckpointRow]:
        """Oldest first."""
        return self._database.read(queries.checkpoints_of, run_id, kept_only=kept_only)

    def checkpoint(self, checkpoint_id: str) -> CheckpointRow:
        return self._database.read(queries.checkpoint, checkpoint_id)

    def checkpoint_parts(self, run_id: str, attempt: int) -> list[PartRow]:
        """What tasks of an attempt wrote of checkpoints that wait for others, and of the newest complete ones."""
        return self._database.read(queries.parts_of, run_id, attempt)

    def events(self, run_id: str) -> list[EventRow]:
        return self._database.read(queries.events_of, run_id)

    def cursors(self, run_id: str, attempt: int) -> dict[tuple[str, str], int]:
        """(task, file) -> offset."""
        return self._database.read(queries.cursors_of, run_id, attempt)

    def metric_keys(self, run_id: str) -> list[dict[str, Any]]:
        """key, count, last, min, max, last_step; by key. NaN counts, but is neither lowest nor highest."""
        return self._database.read(metrics.summary, run_id)

    def metric_points(self, run_id: str, key: str, max_points: int | None = None) -> list[MetricPoint]:
        """(step, value, t, attempt) by step; the newest attempt's value of each. Thinned, it keeps the first,
        the last and every extreme."""
        return self._database.read(metrics.points, run_id, key, max_points)

    def metric_names(self, run_id: str) -> list[str]:
        """The keys alone: what `metric_keys` says of each takes a look at all its points."""
        return sorted(self._database.read(metrics.keys_of, run_id))

    def recent_metrics(self, run_id: str, keys: Sequence[str], limit: int) -> dict[str, list[MetricPoint]]:
        """Of each key that there is, the newest attempt's last points, by step."""
        return self._database.read(metrics.recent, run_id, keys, limit)

    def latest_metrics(self, run_id: str) -> dict[str, float]:
        """What was reported last of each key."""
        return self._database.read(metrics.latest, run_id)

    def metrics_at(self, run_id: str, step: int) -> dict[str, float]:
        """What each key stood at when the training was at this step."""
        return self._database.read(metrics.latest, run_id, up_to=step)

    # -- where things can run --------------------------------------------------------------------------------

    def clusters(self) -> list[ClusterRow]:
        """By name."""
        return self._database.read(clusters.every)

    def put_cluster(self, name: str, config: Json, now: float) -> None:
        """Add it, or give it another configuration."""
        self._database.write(clusters.put, name, config, now)

    def remove_cluster(self, name: str) -> None:
        """NotFound, with those there are, when there is none of that name."""
        self._database.write(clusters.remove, name)

    # -- keeping it ------------------------------------------------------------------------------------------

    def code_digests(self) -> set[str]:
        """The code trees that runs refer to."""
        return self._database.read(_digests, queries.CODES)

    def blob_roots(self) -> set[str]:
        """Every tree that must be kept: code, kept checkpoints and parts of such, outputs."""
        return self._database.read(_digests, queries.ROOTS)

    def schema_version(self) -> int:
        return self._database.read(migrate.version)

    def check(self) -> list[str]:
        """Read everything and say what is wrong. Findings make the store refuse writes."""
        return self._database.check()

    def backup(self, path: str | Path) -> None:
        """A consistent copy, checked and synced, while others write. A file of that name is replaced only by
        a good copy."""
        self._database.copy(Path(path))

    def missing_runs(self, ledger_lines: Iterable[str | bytes | Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Which acknowledged runs are not here, from the lines of a ledger."""
        acknowledged = home_contents.acknowledged(ledger_lines)
        known = self._database.read(queries.known_ids, list(acknowledged))
        return [entry for run_id, entry in acknowledged.items() if run_id not in known]


def _digests(connection: Connection, statement: Any) -> set[str]:
    return set(connection.execute(statement).scalars())
