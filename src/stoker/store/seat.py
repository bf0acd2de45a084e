"""Who leads, among servers that share a database: one row, taken with a new epoch each time.

A server that waits watches the row. Whoever leads writes to it all the time, with every transaction; when
nothing has moved for a whole lease, by the clock of the one who waits, it takes the row over. Clocks are never
compared. The epoch it gets is the fence of its store: from then on the old leader's transactions find that they
are of another epoch, however long it slept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from sqlalchemy import Connection, bindparam, select, update

from stoker.store import migrate
from stoker.store.database import Database, translated
from stoker.store.dialect import dialect_for
from stoker.store.schema import leadership

SEE = select(leadership.c.epoch, leadership.c.holder, leadership.c.url, leadership.c.turn)
TAKE = (
    update(leadership)
    .where(leadership.c.epoch == bindparam("of_epoch"), leadership.c.turn == bindparam("of_turn") + 1)
    .values(epoch=leadership.c.epoch + 1, holder=bindparam("who"), url=bindparam("at"))
)
"""Beginning the transaction has moved the turn by one."""
LEAVE = update(leadership).where(leadership.c.epoch == bindparam("of_epoch")).values(holder="", url="")


@dataclass(frozen=True)
class Leader:
    """What the row says."""

    epoch: int
    holder: str
    """Empty: nobody; who held it has said goodbye."""
    url: str
    turn: int
    """Moves with every transaction that was begun by anybody who writes."""


class Seat:
    """The row, seen from outside: by servers that do not lead yet. Any thread. Raises as a Store does."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, url: str, *, busy_timeout: float = 5.0) -> Self:
        """Makes the tables where there are none; changes none that are older or newer: that is for who leads."""
        dialect = dialect_for(url, busy_timeout=busy_timeout)
        with translated(dialect):
            if not dialect.exists():
                dialect.create(migrate.create)
        return cls(Database(dialect))

    def see(self) -> Leader:
        return self._database.read(_see)

    def take(self, seen: Leader, holder: str, url: str) -> int | None:
        """The new epoch; None when the row is no longer as it was seen."""
        try:
            return self._database.write(_take, seen, holder, url)
        except _TooLate:
            return None

    def leave(self, epoch: int) -> None:
        """Nobody has to wait for us. Nothing when another has taken over."""
        self._database.write(_leave, epoch)

    def close(self) -> None:
        self._database.close()


def _see(connection: Connection) -> Leader:
    return Leader(*connection.execute(SEE).one())


def _take(connection: Connection, seen: Leader, holder: str, url: str) -> int:
    values = {"of_epoch": seen.epoch, "of_turn": seen.turn, "who": holder, "at": url}
    if connection.execute(TAKE, values).rowcount == 0:
        raise _TooLate
    return seen.epoch + 1


class _TooLate(Exception):
    """Takes back the turn: who leads must not find that others have written."""


def _leave(connection: Connection, epoch: int) -> None:
    connection.execute(LEAVE, {"of_epoch": epoch})
