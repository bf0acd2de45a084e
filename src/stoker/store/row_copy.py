"""Copies every row from one database to another, counted and compared.

The digest of a table is the sum of the hashes of its rows, so the order in which a database returns them does not
matter. The leading server is not copied: it belongs to the database, not to its content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, delete, func, insert, select

from stoker.errors import StoreDamaged
from stoker.store import migrate, schema
from stoker.store.dialects.base import file_dialect

CHUNK = 2000
"""Rows in memory at a time."""
TABLES = tuple(
    table
    for table in schema.metadata.sorted_tables
    if table not in (schema.schema_version, schema.leadership)
)
"""Parents before their children."""

Progress = Callable[[str, int, int], None]
"""Called with a table, how many of its rows are done and how many there are."""


@dataclass(frozen=True)
class Digest:
    rows: int
    total: int

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.total:032x}"


Digests = dict[str, Digest]


def silent(table: str, done: int, of: int) -> None:
    """Progress that is not shown."""


def fill(source: Connection, target: Connection, progress: Progress = silent) -> Digests:
    """Copies every row into empty tables, reads them back and returns what was copied. Raises StoreDamaged when the
    rows differ. Commits nothing."""
    sent = {}
    for table in TABLES:
        sum_ = _Sum()
        add = insert(table)
        of = _count(source, table)
        for rows in _chunks(source, table):
            sum_.add(rows)
            target.execute(add, [dict(row._mapping) for row in rows])
            progress(table.name, sum_.rows, of)
        sent[table.name] = sum_.digest()
    arrived = digests(target)
    for name, digest in sent.items():
        if arrived[name] != digest:
            raise StoreDamaged(
                f"the copy of {name} differs from its source: {arrived[name]} instead of {digest}",
                hint="Nothing was changed. Check the disks and try again.",
            )
    return sent


def digests(connection: Connection) -> Digests:
    found = {}
    for table in TABLES:
        sum_ = _Sum()
        for rows in _chunks(connection, table):
            sum_.add(rows)
        found[table.name] = sum_.digest()
    return found


def is_empty(connection: Connection) -> bool:
    return all(connection.execute(select(table).limit(1)).first() is None for table in TABLES)


def clear(connection: Connection) -> None:
    for table in reversed(TABLES):
        connection.execute(delete(table))


def to_file(source: Connection, path: Path) -> None:
    """Copies into a database file, which replaces an existing one."""

    def build(target: Connection) -> None:
        migrate.create(target)
        fill(source, target)

    file_dialect(path).replace(build)


def _count(connection: Connection, table: Table) -> int:
    return int(connection.execute(select(func.count()).select_from(table)).scalar_one())


def _chunks(connection: Connection, table: Table) -> Iterator[Sequence[Any]]:
    result = connection.execute(select(table).execution_options(stream_results=True))
    try:
        yield from result.partitions(CHUNK)
    finally:
        result.close()


class _Sum:
    def __init__(self) -> None:
        self.rows = 0
        self._total = 0

    def add(self, rows: Sequence[Any]) -> None:
        self.rows += len(rows)
        for row in rows:
            hashed = hashlib.blake2b(repr(tuple(row)).encode("utf-8", "surrogatepass"), digest_size=16)
            self._total += int.from_bytes(hashed.digest(), "big")

    def digest(self) -> Digest:
        return Digest(self.rows, self._total % (1 << 128))
