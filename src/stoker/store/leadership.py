"""Who leads, among servers that share a database: one row, taken with a new epoch each time.

A server that waits watches the row. Whoever leads moves it, with every transaction and with a beat when there are
none; when nothing has moved for a whole lease, by the clock of the one who waits, it takes the row over. Clocks
are never compared. The epoch it gets is the fence of its store: from then on the old leader's transactions find
that they are of another epoch, however long it slept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, Engine, bindparam, select, update

from stoker.errors import NotLeading, StoreBusy
from stoker.store import migrate
from stoker.store.database import translated
from stoker.store.dialects.base import Dialect, dialect_for
from stoker.store.retry import patiently
from stoker.store.schema import leadership

T = TypeVar("T")

_HERE = leadership.c.epoch == bindparam("of_epoch")
SEE = select(leadership.c.epoch, leadership.c.holder, leadership.c.url, leadership.c.turn, leadership.c.beat)
TAKE = (
    update(leadership)
    .where(_HERE, leadership.c.turn == bindparam("of_turn"), leadership.c.beat == bindparam("of_beat"))
    .values(
        epoch=leadership.c.epoch + 1,
        holder=bindparam("who"),
        url=bindparam("at"),
        beat=leadership.c.beat + 1,
    )
)
BEAT = update(leadership).where(_HERE).values(beat=leadership.c.beat + 1)
LEAVE = update(leadership).where(_HERE).values(holder="", url="")


@dataclass(frozen=True)
class Leader:
    """What the row says. As long as it stays the same, whoever leads gives no sign of life."""

    epoch: int
    holder: str
    """Empty: nobody; who held it has said goodbye."""
    url: str
    turn: int
    beat: int


class LeaderLease:
    """The row, apart from what a store does with it. Any thread, one at a time. Raises as a Store does."""

    def __init__(self, dialect: Dialect, engine: Engine) -> None:
        self._dialect = dialect
        self._engine = engine

    @classmethod
    def open(cls, url: str, *, busy_timeout: float = 1.0) -> Self:
        """Makes the tables where there are none; changes none that are older or newer: that is for who leads."""
        dialect = dialect_for(url, busy_timeout=busy_timeout)
        engine = dialect.apart()
        with translated(dialect):
            if not dialect.exists():
                dialect.create(migrate.create)
        return cls(dialect, engine)

    @property
    def where(self) -> str:
        return self._dialect.where

    def see(self) -> Leader:
        return self._do(lambda connection: Leader(*connection.execute(SEE).one()))

    def take(self, seen: Leader, holder: str, url: str) -> int | None:
        """The new epoch; None when the row is no longer as it was seen. `holder` must be nobody else's. Raises
        StoreError for a database of a newer version, which this program could not use."""
        self._do(lambda connection: migrate.refuse_newer(migrate.version(connection), self.where))
        values = {
            "of_epoch": seen.epoch,
            "of_turn": seen.turn,
            "of_beat": seen.beat,
            "who": holder,
            "at": url,
        }
        if self._change(TAKE, values):
            return seen.epoch + 1
        # The answer to a first try may have been lost on its way.
        found = self.see()
        return found.epoch if found.holder == holder else None

    def renew(self, epoch: int) -> None:
        """A sign of life. NotLeading when there is a newer epoch."""
        try:
            here = self._change(BEAT, {"of_epoch": epoch})
        except StoreBusy:
            # A long transaction holds the row. While it does nobody can take it; so whose it is will do.
            here = self.see().epoch == epoch
        if not here:
            raise NotLeading(f"another server leads on {self.where} now")

    def leave(self, epoch: int) -> None:
        """Nobody has to wait for us. Nothing when another has taken over."""
        self._change(LEAVE, {"of_epoch": epoch})

    def close(self) -> None:
        self._engine.dispose()

    def _change(self, statement: Any, values: dict[str, Any]) -> bool:
        def work(connection: Connection) -> bool:
            found = connection.execute(statement, values).rowcount > 0
            connection.commit()
            return found

        return self._do(work)

    def _do(self, work: Callable[[Connection], T]) -> T:
        def once() -> T:
            with self._engine.connect() as connection:
                return work(connection)

        with translated(self._dialect):
            return patiently(once, self._dialect.transient, self._dialect.patience)
