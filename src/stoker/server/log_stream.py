"""Logs as they are written: an endless answer that uses no thread while nothing happens.

A follower keeps its position in the archive and waits for the run's counter to rise. The thread pool reads a bounded
piece at a time, and the next piece is read only when the client took the last one. So two hundred followers of a
chatty run cost two hundred small buffers. The answer ends when the run is over and everything it wrote has been
sent. It ends early, without an end record, when the server ends; the client then continues from its position.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool

from stoker.control.logs.lines import Position
from stoker.server.responses import encode
from stoker.server.services import Services
from stoker.spec.states import RunState
from stoker.store.rows import RunRow

PIECE = 256 << 10
"""Bytes of log read at once."""
HEARTBEAT = 15.0
"""Seconds after which a silent answer sends an empty line, so that the client sees it alive."""
OVER = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED, RunState.SUSPENDED})


@dataclass(frozen=True)
class LogQuery:
    task: str | None = None
    attempt: int | None = None
    stream: str | None = None
    since: float | None = None
    tail: int | None = None


async def lines(services: Services, run_id: str, wanted: LogQuery, *, follow: bool) -> AsyncIterator[bytes]:
    """The log as NDJSON, in pieces."""
    controller, closing = services.controller, services.closing
    position: Position | None = None
    over: RunRow | None = None
    while not closing.is_set():
        # The counter is read before the log: a line written in between raises it, so no follower misses it.
        seen = controller.version(run_id)
        data, position, more = await run_in_threadpool(_read, services, run_id, position, wanted)
        if data:
            yield data
        if more:
            continue
        if not follow:
            return
        if over is not None:
            end = {"state": over.state, "exit_code": over.exit_code, "cause": over.cause}
            extra = {"warnings": len(over.warnings)} if over.warnings else {}
            yield encode({"end": {**end, **extra}}) + b"\n"
            return
        run = await run_in_threadpool(services.store.run, run_id)
        if run.state in OVER:
            # The run is over. Lines written before that may still be unread, so read once more.
            over = run
            continue
        if await closing.wait_changed(controller, run_id, seen, HEARTBEAT) == seen:
            yield b"\n"


def _read(
    services: Services, run_id: str, position: Position | None, wanted: LogQuery
) -> tuple[bytes, Position, bool]:
    """A piece of log, the position after it, and whether there may be more at once."""
    records, after = services.archive.read(
        run_id,
        position,
        task=wanted.task,
        attempt=wanted.attempt,
        stream=wanted.stream,
        since=wanted.since,
        tail=wanted.tail,
        limit_bytes=PIECE,
    )
    return b"".join([_line(record) for record in records]), after, bool(records) or _moved(position, after)


def _moved(before: Position | None, after: Position) -> bool:
    """Whether the position advanced: filters may drop a whole piece although more follows."""
    return (before or {}) != after


def _line(record: dict[str, Any]) -> bytes:
    return encode(record) + b"\n"
