"""Follows a run from the terminal that started it: its lines, its state, Ctrl-C, its exit code.

A second thread reads the log stream. This thread prints, asks the server for the state while nothing is printed,
and handles Ctrl-C.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

from stoker.cli.rendering import tables, terminal, units
from stoker.cli.stream import Printer, records, several_tasks
from stoker.errors import ServerUnreachable, StokerError

if TYPE_CHECKING:
    from stoker.cli.context import Context
    from stoker.client import Client

Json = dict[str, Any]
FIRST_LOOK = 0.5
"""Seconds without a line before the first state request: a short run ends sooner and needs none."""
LOOK_EVERY = 2.0


def watch(ctx: Context, run: Json, *, quiet: bool = False, after: Json | None = None) -> int:
    """Follows `run` to its end and returns its exit code. `after`: output of this attempt and of earlier ones is not
    shown again."""
    return _Watch(ctx, run, quiet, after or {}).to_end()


class _Watch:
    def __init__(self, ctx: Context, run: Json, quiet: bool, after: Json) -> None:
        self.ctx = ctx
        self.id = str(run["id"])
        self.quiet = quiet
        self.printer = Printer(ctx, prefixes=several_tasks(run))
        self.status = _Status(ctx, quiet)
        self.stopping = False
        self._records: queue.SimpleQueue[Json | StokerError] = queue.SimpleQueue()
        self._first: Client | None = ctx.client
        self._after = int(after.get("number") or 0)
        # One second earlier: the end is recorded after the last line was written.
        query: Json = {"since": float(after["ended_at"]) - 1.0} if after.get("ended_at") else {}
        threading.Thread(target=self._read, args=(query,), daemon=True).start()

    def _read(self, query: Json) -> None:
        try:
            for record in records(self._connect, self.id, query, follow=True):
                if "end" in record or int(record.get("attempt") or 0) > self._after or not self._after:
                    self._records.put(record)
        except StokerError as exc:
            self._records.put(exc)

    def _connect(self) -> Client:
        """First the connection that submitted the run, then new ones. A new one may start the server again."""
        first, self._first = self._first, None
        return first if first is not None else self.ctx.connect()

    def to_end(self) -> int:
        pause = FIRST_LOOK
        while True:
            try:
                try:
                    record = self._records.get(timeout=pause)
                except queue.Empty:
                    pause = LOOK_EVERY
                    self._poll_state()
                    continue
                if isinstance(record, StokerError):
                    raise record
                if "end" in record:
                    return self._ended(record["end"])
                self.status.clear()
                self.printer(record)
            except KeyboardInterrupt:
                code = self._interrupted()
                if code is not None:
                    return code

    def _interrupted(self) -> int | None:
        """Returns an exit code to leave with; None: continue. A second Ctrl-C, at any point of the question, means
        stop; a third means kill."""
        answer = self._answer()
        while True:
            try:
                return self._act(answer)
            except KeyboardInterrupt:
                answer = "k" if self.stopping else "s"

    def _answer(self) -> str:
        try:
            self.status.clear()
            self.printer.finish_line()
            if self.stopping:
                return "k"
            return self._ask() if self.ctx.interactive else "away"
        except KeyboardInterrupt:
            return "k" if self.stopping else "s"

    def _poll_state(self) -> None:
        try:
            run = self.ctx.client.run(self.id)
            if run["state"] == "queued" and not run.get("reason"):
                text = str(self.ctx.client.why(self.id).get("text") or "")
                run["reason"] = text.partition(" in the queue: ")[2] or text
            elif run["state"] == "starting":
                waiting = (self.ctx.client.why(self.id).get("facts") or {}).get("waiting")
                run["reason"] = str(waiting or "")
            self.status.show(run)
        except ServerUnreachable:
            # The reading thread connects to the server again. Until then the last known state stays on screen.
            self.status.update(
                f"{terminal.safe(self.id)}: the server went away; the training goes on; reconnecting"
            )
            try:
                self.ctx.reconnect()
            except ServerUnreachable:
                return

    def _ended(self, end: Json) -> int:
        self.printer.finish_line()
        self.status.clear()
        if not self.quiet:
            if end.get("state") == "succeeded" and not end.get("warnings"):
                self.ctx.note(f"{terminal.safe(self.id)} succeeded")
            else:
                self._print_end(str(end.get("state")))
        return tables.exit_status(end)

    def _print_end(self, state: str) -> None:
        from stoker.cli.commands.wait import ending_line
        from stoker.cli.rendering.run_details import warnings

        try:
            run = self.ctx.client.run(self.id)
        except ServerUnreachable:
            # The server has just died. How the run ended is known and decides the exit code.
            self.ctx.note(f"{terminal.safe(self.id)} {terminal.safe(state)}")
            return
        self.ctx.note(ending_line(run))
        for warning in warnings(run):
            self.ctx.note(f"{terminal.style('warning', 'yellow', 'bold', on=self.ctx.err_color)}: {warning}")
        if run["state"] == "failed":
            from stoker.client import unshipped  # lazy: only for a run that failed

            if text := unshipped.explain(run):
                self.ctx.note(terminal.safe(text))
            self.ctx.note(f"\nhint: {self._advice(run)}stoker why {terminal.safe(self.id)}")

    def _advice(self, run: Json) -> str:
        """What to do about a module that is missing, as `why` says it: it names the interpreter that ran."""
        attempts = run.get("attempts") or [{}]
        lines = (attempts[-1].get("evidence") or {}).get("last_lines") or []
        if not any("No module named" in line for line in lines):
            return ""
        try:
            advice = self.ctx.client.why(self.id).get("hint")
        except ServerUnreachable:
            return ""
        return f"{terminal.safe(advice)}\n      " if advice else ""

    # -- Ctrl-C ----------------------------------------------------------------------------------------------

    def _act(self, answer: str) -> int | None:
        if answer == "k":
            self.ctx.note(f"killing {terminal.safe(self.id)}")
            self._stop(kill=True)
        elif answer == "s":
            self.stopping = True
            self.ctx.note(f"\nstopping {terminal.safe(self.id)}; Ctrl-C again kills it")
            self._stop(kill=False)
        elif answer == "away":
            return self._detach(130)
        elif answer == "d":
            return self._detach(0)
        return None

    def _stop(self, *, kill: bool) -> None:
        try:
            self.ctx.client.stop(self.id, kill=kill)
        except ServerUnreachable:
            self.ctx.reconnect().stop(self.id, kill=kill)

    def _ask(self) -> str:
        """Returns d, s or c. The end of the input means detach."""
        assert self.ctx.stdin is not None
        while True:
            self.ctx.err.write("\ndetach, stop or continue? [d/s/c] ")
            self.ctx.err.flush()
            line = terminal.read_line(self.ctx.stdin)
            word = line.strip().lower()
            if not line:
                return "d"
            if word[:1] in ("d", "s", "c"):
                return word[0]

    def _detach(self, code: int) -> int:
        name = terminal.safe(self.id)
        self.ctx.note(f"detached; {name} goes on\n  stoker logs -f {name}\n  stoker stop {name}")
        return code


class _Status:
    """The run's state while it prints nothing: one transient line on a terminal, else a line per change."""

    def __init__(self, ctx: Context, quiet: bool) -> None:
        self.ctx = ctx
        self.quiet = quiet
        self.transient = terminal.is_terminal(ctx.err)
        self._shown = ""
        self._last = ""

    def show(self, run: Json) -> None:
        state = run["state"]
        newest = (run.get("attempts") or [{}])[-1]
        if state == "running" and newest.get("number", 1) <= 1 and not _is_incomplete(newest):
            self.clear()
            return
        self.update(status_text(run))

    def update(self, text: str) -> None:
        if self.quiet or text == self._last:
            return
        self._last = text
        if not self.transient:
            self.ctx.note(text)
            return
        self.clear()
        self._shown = terminal.cut(text, (terminal.columns(self.ctx.err) or 80) - 1)
        self.ctx.err.write(terminal.style(self._shown, "dim", on=self.ctx.err_color))
        self.ctx.err.flush()

    def clear(self) -> None:
        if self._shown:
            self.ctx.err.write("\r\x1b[K")
            self.ctx.err.flush()
            self._shown = ""
            self._last = ""


def _is_incomplete(attempt: Json) -> bool:
    """Whether it runs without all of its tasks."""
    return attempt.get("up") is not None and int(attempt["up"]) < int(attempt.get("placed") or 0)


def status_text(run: Json) -> str:
    """`digits-7f3k queued (2nd in line): waits for 2 cpu`"""
    place = run.get("place")
    where = f" ({units.ordinal(int(place))} in line)" if place and run["state"] == "queued" else ""
    reason = terminal.safe(run.get("reason") or "")
    attempts = run.get("attempts") or []
    if run["state"] == "running" and attempts and _is_incomplete(attempts[-1]):
        newest = attempts[-1]
        reason = (
            f"generation {newest.get('generation')} comes up, {newest['up']} of {newest['placed']} tasks up"
        )
    number = attempts[-1].get("number", 1) if attempts else 1
    again = f", attempt {number}" if number > 1 else ""
    return f"{terminal.safe(run['id'])} {terminal.safe(run['state'])}{where}{again}" + (
        f": {reason}" if reason else ""
    )
