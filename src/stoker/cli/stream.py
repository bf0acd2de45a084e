"""Reads log records across restarts of the server, and prints them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from stoker.cli.rendering import terminal, units
from stoker.errors import ServerUnreachable

if TYPE_CHECKING:
    from stoker.cli.context import Context
    from stoker.client import Client

Json = dict[str, Any]
PATIENCE = 8
"""Tries to reach a server that went away: half a minute in all."""


COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")
"""Colours for the names of several tasks."""


class ReadPositions:
    """How far each task's log has been read, so that reading again after a break neither loses nor repeats a line.

    Within one task and attempt, records come in the order they were written. While their times never went back,
    reading continues from the newest time (several records may share it). After a clock was set back, it starts from
    the beginning and skips as many records as were seen."""

    def __init__(self, *, whole: bool = True) -> None:
        self.whole = whole
        """Whether the whole log was requested, so that records can be counted from the beginning."""
        self._newest: dict[tuple[str, int], tuple[float, int]] = {}
        self._total: dict[tuple[str, int], int] = {}
        self._went_back = False
        self._skip: dict[tuple[str, int], tuple[float, int]] = {}

    def again(self) -> float | None:
        """Call before reading again. Returns the time to read from; None: the beginning."""
        if self.whole and self._went_back:
            self._skip = {key: (float("inf"), count) for key, count in self._total.items()}
            return None
        self._skip = dict(self._newest)
        if not self._newest:
            return None
        attempt = max(number for _, number in self._newest)
        return min(t for (_, number), (t, _) in self._newest.items() if number == attempt)

    def fresh(self, record: Json) -> bool:
        """Whether this record is new. Marks it as seen."""
        key = (str(record.get("task")), int(record.get("attempt") or 0))
        t = float(record.get("t") or 0.0)
        if key in self._skip and not self._past(key, t):
            return False
        newest, count = self._newest.get(key, (t, 0))
        self._went_back = self._went_back or t < newest
        self._newest[key] = (t, count + 1) if t == newest else (t, 1)
        self._total[key] = self._total.get(key, 0) + 1
        return True

    def _past(self, key: tuple[str, int], t: float) -> bool:
        boundary, left = self._skip[key]
        counted = boundary == float("inf")
        if t < boundary and not counted:
            return False
        if left > 0 and (counted or t == boundary):
            self._skip[key] = (boundary, left - 1)
            return False
        del self._skip[key]
        return True


def records(
    connect: Callable[[], Client],
    run: str,
    query: Json,
    *,
    follow: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Json]:
    """Log records. With `follow`, until the run ends: the last one is `{"end": ...}`. When the server dies, it is
    connected to again (and so started), and reading continues."""
    client = connect()
    if not follow:
        yield from client.logs(run, **query, follow=False)
        return
    seen = ReadPositions(whole=query.get("since") is None and query.get("tail") is None)
    failures = 0
    while True:
        try:
            for record in client.logs(run, **query, follow=True):
                failures = 0
                if "end" in record:
                    yield record
                    return
                if "text" not in record or seen.fresh(record):
                    yield record
        except ServerUnreachable:
            if failures >= PATIENCE:
                raise
        failures += 1
        if failures > PATIENCE:
            raise ServerUnreachable("the server keeps closing the log", hint="See stoker server logs.")
        sleep(min(5.0, 0.05 * 2**failures))
        client = _again(connect, client)
        since = seen.again()
        if since is not None:
            query = {**query, "since": since, "tail": None}
        elif seen.whole:
            query = {**query, "since": None}


def _again(connect: Callable[[], Client], old: Client) -> Client:
    try:
        return connect()
    except ServerUnreachable:
        return old


class Printer:
    """Prints log records to stdout and stderr. With several tasks, each line begins with `[worker-1] `."""

    def __init__(
        self,
        ctx: Context,
        *,
        prefixes: bool = False,
        timestamps: bool = False,
        raw: bool = False,
        everything_out: bool = False,
        live: bool = True,
    ) -> None:
        self.ctx = ctx
        self.prefixes = prefixes
        self.timestamps = timestamps
        self.raw = raw
        self.everything_out = everything_out
        """Sends stderr lines to stdout too: for `logs`, where both are the data."""
        self.live = live
        """Shows every record at once. Otherwise output is buffered, which is faster."""
        self._open: tuple[str, str] | None = None
        """Task and stream of the unfinished line on the screen."""
        self._open_target = ctx.out
        self._colors: dict[str, str] = {}

    def __call__(self, record: Json) -> None:
        if "dropped" in record:
            self.finish_line()
            self.ctx.note(
                f"... {units.size(record['dropped'])} of {terminal.safe(record.get('task', 'the'))} log dropped ..."
            )
            return
        if "text" not in record:
            return
        stream = str(record.get("stream") or "stdout")
        key = (str(record.get("task") or ""), stream)
        to_err = stream in ("stoker", "s") or (stream in ("stderr", "e") and not self.everything_out)
        target = self.ctx.err if to_err else self.ctx.out
        color = self.ctx.err_color if to_err else self.ctx.out_color
        line = ""
        if self._open != key:
            self.finish_line()
            line = self._before(record, key[0], color)
        text = str(record["text"])
        line += text if self.raw else terminal.safe_log(text, colors=color)
        if record.get("partial"):
            self._open = key
            self._open_target = target
        else:
            self._open = None
            line += "\n"
        if to_err and not self.live:
            self.ctx.out.flush()
        target.write(line)
        if to_err or self.live:
            target.flush()

    def finish_line(self) -> None:
        if self._open is not None:
            self._open_target.write("\n")
            self._open_target.flush()
            self._open = None

    def _before(self, record: Json, task: str, color: bool) -> str:
        parts = ""
        if self.timestamps:
            parts += terminal.style(_stamp(record.get("t")), "dim", on=color) + " "
        if self.prefixes:
            parts += terminal.style(f"[{terminal.safe(task)}]", self._color(task), on=color) + " "
        return parts

    def _color(self, task: str) -> str:
        """Tasks get their colours in turn, in the order of their first lines."""
        return self._colors.setdefault(task, COLORS[len(self._colors) % len(COLORS)])


def _stamp(t: Any) -> str:
    moment = float(t or 0.0)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(moment)) + f".{int(moment * 1000) % 1000:03d}"


def several_tasks(run: Json) -> bool:
    """Whether more than one task writes, so that lines need the task's name."""
    if any(len(attempt.get("tasks") or ()) > 1 for attempt in run.get("attempts") or ()):
        return True
    job = run.get("job") or {}
    workers = job.get("workers")
    return bool(job.get("roles")) or (
        workers is not None and str(workers) not in ("1", "1..1") and workers != {"min": 1, "max": 1}
    )
