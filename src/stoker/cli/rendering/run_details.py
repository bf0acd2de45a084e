"""One run in full for `stoker show`, readable at 80 columns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from stoker.cli.rendering import gang_tables, tables, terminal, units
from stoker.cli.rendering.tables import Cell, Column, table

Json = Mapping[str, Any]
LABEL = 11
EVENTS = 12
"""Newest events shown; `--events` shows all."""


class Page:
    """Collects lines and knows the width and whether colours are on."""

    def __init__(self, *, fit: int | None, color: bool, now: float | None = None) -> None:
        self.fit = None if fit is None else min(fit, 120)
        self.color = color
        self.now = time.time() if now is None else now
        self.lines: list[str] = []

    def title(self, text: str) -> None:
        self.lines += ["", terminal.style(text, "bold", on=self.color)]

    def field(self, label: str, text: str) -> None:
        """`  command    python train.py`, wrapped below the value on a terminal."""
        if not text:
            return
        head = "  " + terminal.style(terminal.pad(label, LABEL), "dim", on=self.color)
        body = [text] if self.fit is None else tables.wrap(text, self.fit - LABEL - 2)
        self.lines.append(head + body[0])
        self.lines += [" " * (LABEL + 2) + line for line in body[1:]]

    def table(self, columns: Sequence[Column], rows: Sequence[tables.Row]) -> None:
        fit = None if self.fit is None else self.fit - 2
        self.lines += ["  " + line for line in table(columns, rows, fit=fit, color=self.color)]


def show_page(run: Json, events: Sequence[Json], page: Page) -> list[str]:
    _header(run, page)
    _hang(run, events, page)
    if gang_tables.several(run):
        _tasks(run, page)
    else:
        _resources(run, page)
        _scaling(run, page, alone=True)
    _attempts(run, page)
    _checkpoints(run, page)
    _outputs(run, page)
    _folder(run, page)
    _events(events, page, EVENTS, terminal.safe(run["id"]))
    for warning in warnings(run):
        page.lines += ["", f"{terminal.style('warning', 'yellow', 'bold', on=page.color)}: {warning}"]
    _next(run, page)
    return page.lines


def warnings(run: Json, most: int = 5) -> list[str]:
    """The newest warnings, which are last. Safe to print."""
    found = [terminal.safe(warning) for warning in run.get("warnings") or []]
    if len(found) <= most:
        return found
    left = len(found) - most
    return [f"{left} more: stoker show {terminal.safe(run['id'])} --json", *found[left:]]


def events_page(events: Sequence[Json], page: Page) -> list[str]:
    _events(events, page, None, "")
    return page.lines[2:]


def _header(run: Json, page: Page) -> None:
    name = terminal.style(terminal.safe(run["id"]), "bold", on=page.color)
    state = terminal.style(
        terminal.safe(run["state"]), *tables.STATE_STYLES.get(run["state"], ()), on=page.color
    )
    took = tables.ran_for(run, page.now)
    page.lines.append(f"{name}  {state}" + (f"  {units.duration(took)}" if took is not None else ""))
    if run.get("reason") and run["reason"] != "completed":
        place = f"{units.ordinal(run['place'])} in line: " if run.get("place") else ""
        page.field(
            "because" if run["state"] in ("failed", "stopped") else "reason",
            place + terminal.safe(run["reason"]),
        )
    page.field("command", gang_tables.render_command(run.get("command") or []))
    page.field("tags", " ".join(f"#{terminal.safe(tag)}" for tag in run.get("tags") or []))
    project = run.get("project")
    page.field("project", terminal.safe(project) if project not in (None, "default") else "")
    page.field("priority", str(run["priority"]) if run.get("priority") else "")
    page.field(
        "submitted",
        _when(run.get("created_at"), page) + (f" by {terminal.safe(run['user'])}" if run.get("user") else ""),
    )
    page.field("started", _when(run.get("started_at"), page) if run.get("started_at") else "")
    page.field("ended", _when(run.get("ended_at"), page) if run.get("ended_at") else "")
    page.field("code", _code(run))


def _when(t: float | None, page: Page) -> str:
    return f"{units.clock(t, page.now)} ({units.age(t, page.now)} ago)"


def _code(run: Json) -> str:
    git = (run.get("record") or {}).get("git") or {}
    parts = [f"tree {terminal.safe(run['code'])[:12]}"] if run.get("code") else []
    if git.get("commit"):
        dirty = " with changes that are not committed" if git.get("dirty") else ""
        parts.append(f"git {terminal.safe(git['commit'])[:12]}{dirty}")
    return ", ".join(parts)


def _resources(run: Json, page: Page) -> None:
    wanted = tables.resources(run)
    used = (run.get("attempts") or [{}])[-1].get("usage") or {}
    rows: list[tables.Row] = []
    if wanted.get("cpu") is not None or used.get("cpu_peak") is not None:
        rows.append(("cpu", _number(wanted.get("cpu")), _number(used.get("cpu_peak"), 2), _cpu_note(used)))
    if wanted.get("memory") is not None or used.get("memory_peak") is not None:
        peak, limit = used.get("memory_peak"), wanted.get("memory")
        share = (
            f"{100 * peak / limit:.0f}% of the limit"
            if isinstance(peak, int | float) and isinstance(limit, int | float) and limit
            else ""
        )
        rows.append(("memory", "-" if limit is None else tables.memory(limit), units.size(peak), share))
    if wanted.get("gpu") or used.get("gpu_peak") is not None:
        peak_gpu = used.get("gpu_peak")
        memory = used.get("gpu_memory_peak")
        note = f"{units.size(memory)} of GPU memory" if memory else ""
        rows.append(
            ("gpu", _number(wanted.get("gpu")), "-" if peak_gpu is None else f"{peak_gpu:.0f}%", note)
        )
    if rows:
        page.title("Resources")
        page.table(
            (Column(""), Column("ASKED", right=True), Column("PEAK", right=True), Column("", shrink=True)),
            rows,
        )
        _isolation((run.get("attempts") or [{}])[-1].get("isolation") or {}, page)


def _tasks(run: Json, page: Page) -> None:
    """The tasks, the state of the world and what slows it down."""
    attempt = gang_tables.newest(run)
    number = attempt.get("number") or 1
    page.title("Tasks" if number == 1 else f"Tasks of attempt {number}")
    page.table(*gang_tables.tasks_table(run))
    page.lines.append("")
    page.field("world", terminal.safe((attempt.get("world") or {}).get("text") or "").removeprefix("world "))
    page.field("straggler", terminal.safe((attempt.get("straggler") or {}).get("text") or ""))
    _scaling(run, page)
    _isolation(attempt.get("isolation") or {}, page)


def _scaling(run: Json, page: Page, *, alone: bool = False) -> None:
    found = run.get("scaling") or {}
    if not found:
        return
    if alone:
        page.lines.append("")
    page.field("pace", terminal.safe(found.get("pace") or ""))
    page.field("scaling", terminal.safe(found.get("text") or ""))


def _hang(run: Json, events: Sequence[Json], page: Page) -> None:
    """The newest hang of each task of the newest attempt."""
    began = (gang_tables.newest(run).get("started_at") or 0.0) - 1.0
    found = [event for event in events if event["kind"] == "hang" and event["t"] >= began]
    if found:
        newest = {(event.get("data") or {}).get("task"): event for event in found}
        for event in list(newest.values())[-4:]:
            page.field(
                "hang", f"{terminal.safe(event.get('text') or '')} ({units.age(event['t'], page.now)} ago)"
            )


def _isolation(how: Json, page: Page) -> None:
    """The limits that are enforced, and those that are not."""
    if not how:
        return
    page.field(
        "held by", ", ".join(f"{terminal.safe(kind)}: {terminal.safe(how[kind])}" for kind in sorted(how))
    )
    loose = [kind for kind in ("memory", "cpu", "pids", "processes", "gpu") if kind not in how]
    if loose:
        page.field("not held", f"{', '.join(loose)}; `stoker doctor` says why")


def _numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _number(value: Any, digits: int | None = None) -> str:
    if digits is not None and isinstance(value, float):
        value = round(value, digits)
    return units.number(value)


def _cpu_note(used: Json) -> str:
    seconds = used.get("cpu_seconds")
    return f"{units.duration(float(seconds))} of CPU time" if seconds else ""


def _attempts(run: Json, page: Page) -> None:
    attempts = run.get("attempts") or []
    if not attempts:
        return
    page.title("Attempts")
    columns = (
        Column("#", right=True),
        Column("STATE"),
        Column("STARTED"),
        Column("TIME", right=True),
        Column("FROM"),
        Column("NODE", spare=True),
        Column("HOW IT ENDED", shrink=True),
    )
    names = {c["id"]: c for c in run.get("checkpoints") or []}
    rows: list[tables.Row] = []
    for attempt in attempts:
        took = tables.ran_for(attempt, page.now)
        rows.append(
            (
                str(attempt["number"]),
                _attempt_state(attempt),
                units.clock(attempt.get("started_at"), page.now),
                units.duration(took),
                _origin(run, attempt, names),
                _place(attempt),
                cause_text(attempt),
            )
        )
    page.table(columns, rows)
    last = attempts[-1]
    lines = (last.get("evidence") or {}).get("last_lines") or []
    if lines and last.get("cause") not in (None, "completed"):
        whose = (last.get("evidence") or {}).get("task")
        of = f"{terminal.safe(whose)} in attempt" if whose else "attempt"
        page.lines += ["", f"  last lines of {of} {last['number']}:"]
        shown = [terminal.safe_log(str(line), colors=False) for line in lines[-8:]]
        page.lines += [
            "    " + (line if page.fit is None else terminal.cut(line, page.fit - 4)) for line in shown
        ]


def _attempt_state(attempt: Json) -> Cell:
    state = str(attempt.get("state") or "-")
    if state == "ended":
        fine = attempt.get("cause") == "completed"
        return Cell("ended", ("green",) if fine else ("red",))
    return tables.state_cell(state)


def _origin(run: Json, attempt: Json, checkpoints: Mapping[str, Json]) -> str:
    found = attempt.get("resumed_from")
    if not found:
        # Which files a script resumes from, if any, only the script knows.
        return "its folder" if attempt["number"] > 1 and run.get("folder") else "the start"
    known = checkpoints.get(found)
    if known is not None and known.get("step") is not None:
        return f"step {known['step']}"
    return terminal.safe(known["name"] if known is not None else found)


def _place(attempt: Json) -> str:
    if len(attempt.get("nodes") or ()) > 1:
        return units.plural(len(attempt["nodes"]), "node")
    gpus = attempt.get("gpus") or []
    node = terminal.safe(attempt.get("node") or "-")
    return f"{node} gpu {','.join(_short_gpu(gpu) for gpu in gpus)}" if gpus else node


def _short_gpu(gpu: Any) -> str:
    text = terminal.safe(gpu)
    return text if len(text) <= 8 else text.removeprefix("GPU-")[:8]


def cause_text(attempt: Json) -> str:
    """`oom: peak 600 MiB over the limit of 500 MiB`, `user-error: exit code 1`"""
    cause = attempt.get("cause")
    if not cause:
        return ""
    evidence = attempt.get("evidence") or {}
    said = next(
        (terminal.safe(evidence[key]) for key in ("message", "proof", "text") if evidence.get(key)), ""
    )
    parts = []
    if cause != "completed" and attempt.get("exit_code") not in (None, 0) and not evidence.get("signal"):
        parts.append(f"exit code {attempt['exit_code']}")
    if evidence.get("signal") and _signal(evidence["signal"]) not in said:
        parts.append(_signal(evidence["signal"]))
    if _numbers(evidence.get("peak"), evidence.get("limit")):
        parts.append(f"peak {units.size(evidence['peak'])} of {units.size(evidence['limit'])}")
    if said:
        parts.append(said)
    if evidence.get("task") and cause != "completed":
        parts = [
            f"{terminal.safe(evidence['task'])}: {', '.join(parts)}"
            if parts
            else terminal.safe(evidence["task"])
        ]
    return ": ".join([terminal.safe(cause), ", ".join(parts)] if parts else [terminal.safe(cause)])


def _signal(number: Any) -> str:
    import signal  # lazy: only for `show`

    try:
        return signal.Signals(int(number)).name
    except ValueError:
        return f"signal {terminal.safe(number)}"


def _checkpoints(run: Json, page: Page) -> None:
    found = run.get("checkpoints") or []
    if not found:
        return
    kept = [c for c in found if c.get("kept", True)]
    page.title(f"Checkpoints ({len(kept)} kept of {len(found)})")
    columns = (
        Column("ID"),
        Column("NAME", shrink=True),
        Column("STEP", right=True),
        Column("SIZE", right=True),
        Column("WRITTEN", spare=True),
        Column("HOW", spare=True),
    )
    shown = sorted(kept, key=lambda c: c.get("created_at") or 0)[-6:]
    page.table(
        columns,
        [
            (
                terminal.safe(c["id"]),
                terminal.safe(c["name"]),
                "-" if c.get("step") is None else str(c["step"]),
                units.size(c.get("size")),
                units.clock(c.get("created_at"), page.now),
                terminal.safe(c.get("how") or ""),
            )
            for c in shown
        ],
    )


def _outputs(run: Json, page: Page) -> None:
    outputs = run.get("outputs")
    if outputs and outputs.get("files"):
        page.title("Outputs")
        page.lines.append(f"  {units.plural(outputs['files'], 'file')}, {units.size(outputs.get('bytes'))}")


def _folder(run: Json, page: Page) -> None:
    """What is kept of the working folder."""
    folder = run.get("folder")
    if not folder:
        return
    page.title("Working folder")
    text = f"  {units.plural(folder['files'], 'file')}, {units.size(folder.get('bytes'))}"
    if folder.get("newest"):
        text += f"; newest: {terminal.safe(folder['newest'])}"
    page.lines.append(text)
    if left := folder.get("left"):
        names = ", ".join(terminal.safe(one["path"]) for one in left["named"][:3])
        count, size = units.plural(left["files"], "file"), units.size(left["bytes"])
        page.lines.append(f"  not kept, over the budget: {count}, {size}: {names}")
    if ignored := folder.get("ignored"):
        page.lines.append(f"  not kept, in .stokerignore: {terminal.safe(', '.join(ignored[:5]))}")


def _events(events: Sequence[Json], page: Page, limit: int | None, name: str) -> None:
    if not events:
        return
    page.title("Events")
    shown = events if limit is None else events[-limit:]
    if len(shown) < len(events):
        page.lines.append(f"  ... {len(events) - len(shown)} earlier: stoker show {name} --events")
    wide = max(terminal.width(terminal.safe(event["kind"])) for event in shown)
    for event in shown:
        when = terminal.style(units.clock(event["t"], page.now), "dim", on=page.color)
        text = terminal.safe(event.get("text") or "")
        room = (
            None
            if page.fit is None
            else page.fit - 2 - terminal.width(units.clock(event["t"], page.now)) - wide - 4
        )
        text = text if room is None else terminal.cut(text, room)
        page.lines.append(f"  {when}  {terminal.pad(terminal.safe(event['kind']), wide)}  {text}".rstrip())


def _next(run: Json, page: Page) -> None:
    name, state = terminal.safe(run["id"]), run["state"]
    ideas: dict[str, list[str]] = {
        "queued": [f"stoker why {name}"],
        "failed": [f"stoker why {name}", f"stoker logs {name} --tail 50", f"stoker resume {name}"],
        "stopped": [f"stoker resume {name}"],
        "suspended": [f"stoker resume {name}"],
        "succeeded": [f"stoker pull {name}"]
        if any((run.get(kept) or {}).get("files") for kept in ("outputs", "folder"))
        else [f"stoker logs {name}"],
    }
    found = ideas.get(state, [f"stoker logs -f {name}", f"stoker stop {name}"])
    page.lines += ["", *(terminal.style(f"  {line}", "dim", on=page.color) for line in found)]
