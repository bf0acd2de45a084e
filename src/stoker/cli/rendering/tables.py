"""Tables, and how runs are shown in them. All printed text has gone through `terminal.safe`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stoker.cli.rendering import terminal, units

STATE_STYLES = {
    "queued": ("yellow",),
    "starting": ("cyan",),
    "running": ("green", "bold"),
    "stopping": ("magenta",),
    "suspended": ("blue",),
    "succeeded": ("green",),
    "failed": ("red", "bold"),
    "stopped": ("dim",),
}
TERMINAL = frozenset({"succeeded", "failed", "stopped"})
LIVE = ("queued", "starting", "running", "stopping")


class Column(NamedTuple):
    title: str
    right: bool = False
    shrink: bool = False
    """May be cut to fit the terminal."""
    spare: bool = False
    """Left out where the terminal is too narrow for all."""


class Cell(NamedTuple):
    text: str
    styles: tuple[str, ...] = ()


Row = Sequence[Cell | str]


def table(columns: Sequence[Column], rows: Sequence[Row], *, fit: int | None, color: bool) -> list[str]:
    """Aligned lines. `fit`: the width to keep, by cutting columns that may shrink; None: cut nothing."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    widths = [
        max([terminal.width(column.title), *(terminal.width(row[index].text) for row in cells)])
        for index, column in enumerate(columns)
    ]
    if fit is not None:
        kept = _kept(columns, widths, fit)
        columns, widths = [columns[i] for i in kept], [widths[i] for i in kept]
        cells = [[row[i] for i in kept] for row in cells]
        _shrink(columns, widths, fit)
    header = [Cell(column.title, ("dim",)) for column in columns]
    return [_line(columns, widths, row, fit, color) for row in [header, *cells]]


def _kept(columns: Sequence[Column], widths: Sequence[int], fit: int) -> list[int]:
    """The columns that fit once those that may shrink have shrunk."""
    kept = list(range(len(columns)))

    def least() -> int:
        return sum(_least(columns[i]) if columns[i].shrink else widths[i] for i in kept) + 2 * (len(kept) - 1)

    for index in [i for i, column in enumerate(columns) if column.spare][::-1]:
        if least() > fit:
            kept.remove(index)
    return kept


def _least(column: Column) -> int:
    return max(8, terminal.width(column.title))


def _shrink(columns: Sequence[Column], widths: list[int], fit: int) -> None:
    over = sum(widths) + 2 * (len(widths) - 1) - fit
    for index in sorted((i for i, c in enumerate(columns) if c.shrink), key=lambda i: -widths[i]):
        if over <= 0:
            return
        smaller = max(_least(columns[index]), widths[index] - over)
        over -= widths[index] - min(smaller, widths[index])
        widths[index] = min(smaller, widths[index])


def _line(
    columns: Sequence[Column], widths: Sequence[int], row: Sequence[Cell], fit: int | None, color: bool
) -> str:
    parts = []
    for index, (column, cell) in enumerate(zip(columns, row, strict=True)):
        text = cell.text if fit is None else terminal.cut(cell.text, widths[index])
        last = index == len(columns) - 1
        padded = text if last and not column.right else terminal.pad(text, widths[index], right=column.right)
        parts.append(
            padded.replace(text, terminal.style(text, *cell.styles, on=color), 1) if text else padded
        )
    return "  ".join(parts).rstrip()


# -- runs ------------------------------------------------------------------------------------------------------


def runs_table(
    runs: Sequence[Mapping[str, Any]], *, fit: int | None, color: bool, now: float | None = None
) -> list[str]:
    """The table of `ps`."""
    at = time.time() if now is None else now
    columns = [
        Column("ID"),
        Column("STATE"),
        Column("AGE", right=True),
        Column("TIME", right=True, spare=True),
        Column("TASKS", right=True, spare=True),
        Column("ASKED", spare=True),
        Column("INFO", shrink=True),
    ]
    rows: list[list[Cell | str]] = [
        [
            Cell(terminal.safe(run["id"]), ("bold",)),
            state_cell(run["state"]),
            units.age(run.get("created_at"), at),
            units.duration(ran_for(run, at)),
            tasks_up(run) or "-",
            asked(run),
            info(run),
        ]
        for run in runs
    ]
    if not any(tasks_up(run) for run in runs):
        columns, rows = columns[:4] + columns[5:], [row[:4] + row[5:] for row in rows]
    return table(columns, rows, fit=fit, color=color)


def state_cell(state: str) -> Cell:
    return Cell(terminal.safe(state), STATE_STYLES.get(state, ()))


def tasks_up(run: Mapping[str, Any]) -> str:
    """`3/4`: tasks that are up, of those placed; `4` for an ended run; empty for a single task."""
    attempt = (run.get("attempts") or [{}])[-1]
    placed = attempt.get("placed") or len(attempt.get("tasks") or ())
    if placed < 2:
        return ""
    return str(placed) if attempt.get("up") is None else f"{attempt['up']}/{placed}"


def ran_for(run: Mapping[str, Any], now: float) -> float | None:
    """Seconds from the first start to the end, or to now."""
    started = run.get("started_at")
    if started is None:
        return None
    return float(run.get("ended_at") or now) - float(started)


def resources(run: Mapping[str, Any]) -> dict[str, Any]:
    job = run.get("job") or {}
    found = job.get("resources") or {}
    return found if isinstance(found, dict) else {}


def asked(run: Mapping[str, Any]) -> str:
    """`1 cpu 500 MiB 2 gpu`, `4 x 1 cpu` for each of several workers, or `-`"""
    wanted = resources(run)
    parts = []
    if wanted.get("cpu") is not None:
        parts.append(f"{units.number(wanted['cpu'])} cpu")
    if wanted.get("memory") is not None:
        parts.append(memory(wanted["memory"]))
    if wanted.get("gpu"):
        parts.append(f"{units.number(wanted['gpu'])} gpu")
    workers = (run.get("job") or {}).get("workers")
    each = f"{terminal.safe(workers)} x " if parts and workers not in (None, 1) else ""
    return each + " ".join(parts) if parts else "-"


def memory(value: Any) -> str:
    return units.size(value) if isinstance(value, int | float) else terminal.safe(value)


def info(run: Mapping[str, Any]) -> str:
    """The most important fact about a run, for a list."""
    state = run["state"]
    reason = terminal.safe(run.get("reason") or "")
    if reason in ("completed", state):
        reason = ""
    if state == "queued":
        place = run.get("place")
        where = f"{units.ordinal(place)} in line" if place else ""
        return ": ".join(part for part in (where, reason) if part)
    if state in ("failed", "stopped") or run.get("cause") not in (None, "completed"):
        code = run.get("exit_code")
        cause = terminal.safe(run.get("cause") or "")
        return reason or (f"exit code {code}" if code not in (None, 0) else "" if cause == state else cause)
    if reason:
        return reason
    attempts = run.get("attempts") or []
    if attempts and state in ("starting", "running", "stopping"):
        newest = attempts[-1]
        number = newest.get("number") or 1
        gpus = newest.get("gpus") or []
        parts = [f"attempt {number}"] if number > 1 else []
        many = len(newest.get("nodes") or ())
        where = units.plural(many, "node") if many > 1 else terminal.safe(newest.get("node") or "")
        parts += [f"on {where}"] if where else []
        parts += [f"gpu {','.join(terminal.safe(gpu) for gpu in gpus)}"] if gpus else []
        return ", ".join(parts)
    return " ".join(f"#{terminal.safe(tag)}" for tag in run.get("tags") or [])


def exit_status(run: Mapping[str, Any]) -> int:
    """The exit code for how a run ended: the training's own, 128 + N after signal N."""
    state, code = run.get("state"), run.get("exit_code")
    if state == "suspended":
        return 75
    if isinstance(code, int) and not isinstance(code, bool):
        return 128 - code if code < 0 else code
    return {"succeeded": 0, "stopped": 143}.get(str(state), 1)


def wrap(text: str, columns: int, *, indent: str = "") -> list[str]:
    """Paragraphs of safe text, wrapped at spaces."""
    import textwrap  # lazy: only for `why` and `show`

    lines: list[str] = []
    for paragraph in terminal.safe_lines(text):
        found = textwrap.wrap(
            paragraph, max(20, columns - len(indent)), break_long_words=False, break_on_hyphens=False
        )
        lines += [indent + line for line in found] or [""]
    return lines
