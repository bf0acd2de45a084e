"""Moves rows from one database to another, and back from a copy, while no server uses either.

The target gets them in one transaction: after a crash it has everything or nothing, and the move can be repeated. A
database that several servers share is taken as a leading server takes it.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection

from stoker.errors import Conflict, StoreDamaged, StoreError
from stoker.store import row_copy
from stoker.store.codec import RESTORE_HINT
from stoker.store.database import Database
from stoker.store.dialects.base import is_shared
from stoker.store.dialects.sqlite import put_in_place as put_file_in_place
from stoker.store.leadership import LeaderLease
from stoker.store.store import Store

LEASE = 15.0
"""Seconds of silence after which a server that did not give up the lead counts as gone."""
_POLL = 0.2
_ME = "stoker"


@dataclass(frozen=True)
class Moved:
    rows: dict[str, int]
    """Table -> rows, each compared with its source."""
    already: bool
    """Whether everything was there: an earlier try had finished the copy."""


def move(
    source: str | Path,
    target: str | Path,
    *,
    lease: float = LEASE,
    progress: row_copy.Progress = row_copy.silent,
) -> Moved:
    """Copies every row of `source` to `target`, which must be empty or hold exactly these rows. `source` stays."""
    with (
        taken(source, lease) as old_epoch,
        Store.open(source, create=False, epoch=old_epoch) as old,
        taken(target, lease) as new_epoch,
        Store.open(target, epoch=new_epoch) as new,
    ):
        problems = old.check()
        if problems:
            raise StoreDamaged(f"{old.where} is damaged: {problems[0]}", hint=RESTORE_HINT)
        return old._database.read(_copy_rows, old._database, new._database, progress)


def put_in_place(
    copy: Path, target: str | Path, *, aside: Path | None = None, lease: float = LEASE
) -> Path | None:
    """Makes a copy, which is a file, the database at `target`. The old database is kept, and its place is returned: a
    copy in `aside`, or the moved file. Raises StoreDamaged when the copy fails its check."""
    if not is_shared(target):
        return put_file_in_place(copy, Path(target))
    if aside is None:
        raise ValueError("`aside` is needed to keep the old database")
    with tempfile.TemporaryDirectory(prefix="stoker-restore-") as directory, taken(target, lease) as epoch:
        # Checked and migrated in a temporary place, so that the copy itself does not change.
        put_file_in_place(copy, Path(directory) / "copy.db")
        with Store.open(Path(directory) / "copy.db") as given, Store.open(target, epoch=epoch) as store:
            kept = aside / f"replaced-{time.time_ns()}.db"
            store.backup(kept)
            given._database.read(_replace, given._database, store._database)
    return kept


def file_from(source: str, path: Path, *, lease: float = LEASE) -> Moved:
    """Copies a shared database into a file. The file must be missing or hold exactly the same."""
    with taken(source, lease) as epoch, Store.open(source, create=False, epoch=epoch) as old:
        problems = old.check()
        if problems:
            raise StoreDamaged(f"{old.where} is damaged: {problems[0]}", hint=RESTORE_HINT)
        if not path.exists():
            old.backup(path)
            already = False
        else:
            already = True
        with Store.open(path, create=False) as new:
            wanted = old._database.read(row_copy.digests)
            if new._database.read(row_copy.digests) != wanted:
                raise _other_data(new.where)
    return Moved({name: digest.rows for name, digest in wanted.items()}, already)


@contextlib.contextmanager
def taken(url: str | Path, lease: float) -> Iterator[int | None]:
    """Holds the lead while the block runs; yields the epoch. Raises Conflict when a server leads. Yields None for a
    file, which the lock of its home protects."""
    if not is_shared(url):
        yield None
        return
    leader_lease = LeaderLease.open(str(url))
    done = threading.Event()
    try:
        epoch = _take(leader_lease, lease)
        keeping = threading.Thread(target=_keep, args=(leader_lease, epoch, lease, done), daemon=True)
        keeping.start()
        try:
            yield epoch
        finally:
            done.set()
            keeping.join()
            leader_lease.release(epoch)
    finally:
        leader_lease.close()


def _take(leader_lease: LeaderLease, lease: float) -> int:
    seen = leader_lease.read()
    until = time.monotonic() + lease
    while seen.holder and time.monotonic() < until:
        time.sleep(_POLL)
        found = leader_lease.read()
        if found != seen and found.holder:
            name = found.holder.split(" ")[0]
            raise Conflict(
                f"a server uses {leader_lease.where}: {name}, at {found.url or 'an unknown address'}",
                hint="Stop every server on this database first.",
            )
        seen = found
    epoch = leader_lease.take(seen, f"{_ME} - {secrets.token_hex(8)}", "")
    if epoch is None:
        raise Conflict(f"a server has just begun to use {leader_lease.where}", hint="Stop it first.")
    return epoch


def _keep(leader_lease: LeaderLease, epoch: int, lease: float, done: threading.Event) -> None:
    while not done.wait(min(1.0, lease / 5)):
        # A beat that fails is repeated by the next one; the fence holds in any case.
        with contextlib.suppress(StoreError):
            leader_lease.renew(epoch)


def _copy_rows(source: Connection, old: Database, new: Database, progress: row_copy.Progress) -> Moved:
    old.dialect.lift_time_limits(source)
    already = not new.read(row_copy.is_empty)
    if already:
        sent = row_copy.digests(source)
        if new.read(row_copy.digests) != sent:
            raise _other_data(new.dialect.where)
    else:
        sent = new.write(_load, source, new, progress)
    return Moved({name: digest.rows for name, digest in sent.items()}, already)


def _replace(source: Connection, old: Database, new: Database) -> None:
    def work(target: Connection) -> None:
        row_copy.clear(target)
        _load(target, source, new, row_copy.silent)

    new.write(work)


def _load(
    target: Connection, source: Connection, new: Database, progress: row_copy.Progress
) -> row_copy.Digests:
    new.dialect.lift_time_limits(target)
    sent = row_copy.fill(source, target, progress)
    new.dialect.loaded(target)
    return sent


def _other_data(where: str) -> Conflict:
    return Conflict(
        f"{where} holds other data already",
        hint="Name an empty database. Nothing was changed.",
        details={"where": where},
    )
