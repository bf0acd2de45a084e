"""Which server leads, among those that share a database: one row, taken with a new epoch each time.

A waiting server watches the row. The leader changes it with every transaction, and with a beat when there are none.
When the row has not changed for a whole lease by the waiting server's clock, that server takes it over. Clocks are
never compared. The new epoch is the fence of the new leader's store: transactions of the old leader find another
epoch, however long it was stopped.
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
from stoker.store.retry import with_retries
from stoker.store.schema import leadership

T = TypeVar("T")

_HERE = leadership.c.epoch == bindparam("of_epoch")
READ = select(leadership.c.epoch, leadership.c.holder, leadership.c.url, leadership.c.turn, leadership.c.beat)
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
RELEASE = update(leadership).where(_HERE).values(holder="", url="")


@dataclass(frozen=True)
class Leader:
    """The content of the row. While it stays the same, the leader gives no sign of life."""

    epoch: int
    holder: str
    """Empty: no server leads; the last one gave up the lead."""
    url: str
    turn: int
    beat: int


class LeaderLease:
    """The row of the leader, apart from the store. Any thread, one at a time. Raises as a Store does."""

    def __init__(self, dialect: Dialect, engine: Engine) -> None:
        self._dialect = dialect
        self._engine = engine

    @classmethod
    def open(cls, url: str, *, busy_timeout: float = 1.0) -> Self:
        """Creates the tables where there are none. Never changes older or newer tables: only a leader does that."""
        dialect = dialect_for(url, busy_timeout=busy_timeout)
        engine = dialect.apart()
        with translated(dialect):
            if not dialect.exists():
                dialect.create(migrate.create)
        return cls(dialect, engine)

    @property
    def where(self) -> str:
        return self._dialect.where

    def read(self) -> Leader:
        return self._do(lambda connection: Leader(*connection.execute(READ).one()))

    def take(self, seen: Leader, holder: str, url: str) -> int | None:
        """Takes the lead and returns the new epoch; None when the row has changed since `seen`. `holder` must be
        unique. Raises StoreError for a database of a newer version, which this program cannot use."""
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
        # The answer to a first try may have been lost.
        found = self.read()
        return found.epoch if found.holder == holder else None

    def renew(self, epoch: int) -> None:
        """Gives a sign of life. Raises NotLeading when there is a newer epoch."""
        try:
            here = self._change(BEAT, {"of_epoch": epoch})
        except StoreBusy:
            # A long transaction holds the row, and meanwhile no other server can take it. So reading the epoch
            # suffices.
            here = self.read().epoch == epoch
        if not here:
            raise NotLeading(f"another server leads on {self.where} now")

    def release(self, epoch: int) -> None:
        """Gives up the lead, so that no server waits for the lease. Nothing when another one has taken over."""
        self._change(RELEASE, {"of_epoch": epoch})

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
            return with_retries(once, self._dialect.transient, self._dialect.patience)
