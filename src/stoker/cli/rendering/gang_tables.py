"""Runs with several tasks on the terminal: the table of tasks and the plan of a dry run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.cli.rendering import tables, terminal, units
from stoker.cli.rendering.tables import Cell, Column, Row

Json = Mapping[str, Any]

PHASE_STYLES = {
    "running": ("green",),
    "setup": ("cyan",),
    "starting": ("cyan",),
    "ready": ("cyan",),
    "stopping": ("magenta",),
}


def newest(run: Json) -> Json:
    """The last attempt."""
    attempts = run.get("attempts") or [{}]
    found: Json = attempts[-1]
    return found


def several(run: Json) -> bool:
    """Whether its newest attempt has more than one task."""
    return len(newest(run).get("tasks") or ()) > 1


def tasks_table(run: Json) -> tuple[list[Column], list[Row]]:
    """The tasks of the newest attempt, without empty columns."""
    attempt = newest(run)
    over = attempt.get("state") == "ended"
    rows = [_cells(task, run, over) for task in attempt["tasks"]]
    columns = [
        Column("TASK"),
        Column("NODE", shrink=True),
        Column("GEN", right=True),
        Column("PHASE"),
        Column("EXIT", right=True),
        Column("STEP", right=True),
        Column("S/STEP", right=True),
        Column("CPU PEAK" if over else "CPU", right=True, spare=True),
        Column("MEMORY PEAK" if over else "MEMORY", right=True, spare=True),
        Column("GPU PEAK" if over else "GPU", right=True, spare=True),
        Column("REPLACED", right=True, spare=True),
        Column("ASKED", spare=True),
    ]
    kept = [i for i in range(len(columns)) if any(_text(row[i]) for row in rows)]
    return [columns[i] for i in kept], [[_filled(row[i]) for i in kept] for row in rows]


def _cells(task: Json, run: Json, over: bool) -> list[Cell | str]:
    used = task.get("usage") or {}
    replaced = int(task.get("incarnation") or 1) - 1
    phase = terminal.safe(task.get("phase") or "starting")
    code = task.get("exit_code")
    failed = phase == "ended" and code not in (None, 0)
    styles = ("red", "bold") if failed else PHASE_STYLES.get(phase, ())
    cpu = used.get("cpu_peak") if over else used.get("cpu")
    memory = used.get("memory_peak") if over else used.get("memory")
    gpu = used.get("gpu_peak") if over else used.get("gpu", used.get("gpu_peak"))
    asked = tables.asked({"job": {"resources": asked_of(run.get("job") or {}, str(task.get("role") or ""))}})
    return [
        Cell(terminal.safe(task["name"]), ("bold",)),
        terminal.safe(_where(task)),
        str(task.get("generation") or 1),
        Cell(phase, styles),
        "" if code is None else str(code),
        "" if used.get("step") is None else units.number(used["step"]),
        "" if used.get("step_seconds") is None else units.number(used["step_seconds"]),
        "" if cpu is None else units.number(round(float(cpu), 2)),
        units.size(memory) if memory else "",
        "" if gpu is None else f"{float(gpu):.0f}%",
        f"{replaced}x" if replaced else "",
        "" if asked == "-" else asked,
    ]


def _where(task: Json) -> str:
    gpus = task.get("gpus") or []
    node = str(task.get("node") or "")
    short = [str(gpu) if len(str(gpu)) <= 8 else str(gpu).removeprefix("GPU-")[:8] for gpu in gpus]
    return f"{node} gpu {','.join(short)}" if gpus else node


def asked_of(job: Json, role: str) -> dict[str, Any]:
    """What the job asks for each task of a role."""
    own = (job.get("roles") or {}).get(role)
    found = (own or {}).get("resources") if own is not None else job.get("resources")
    return dict(found) if isinstance(found, dict) else {}


def _text(cell: Cell | str) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def _filled(cell: Cell | str) -> Cell | str:
    return cell if _text(cell) else "-"


def plan_table(answer: Json) -> tuple[list[Column], list[Row]]:
    """`--dry-run`: the tasks that would be started."""
    rows: list[Row] = []
    for task in (answer.get("plan") or {}).get("tasks") or []:
        command = task.get("command") or []
        rows.append(
            [
                Cell(terminal.safe(task["name"]), ("bold",)),
                _asked(task),
                str(task.get("processes") or 1),
                _LOSS.get(task.get("on_loss"), "") + (" (if there is room)" if task.get("optional") else ""),
                render_command(command),
            ]
        )
    columns = [
        Column("TASK"),
        Column("HOLDS"),
        Column("PROCESSES", right=True, spare=True),
        Column("WHEN LOST", spare=True),
        Column("COMMAND", shrink=True),
    ]
    if all(row[2] == "1" for row in rows):
        columns, rows = columns[:2] + columns[3:], [[*row[:2], *row[3:]] for row in rows]
    return columns, rows


_LOSS = {"world": "all start again", "task": "comes back alone", "ignore": "not replaced"}


def _asked(task: Json) -> str:
    found = {key: task.get(key) for key in ("cpu", "memory", "gpu") if task.get(key)}
    return tables.asked({"job": {"resources": found}})


def render_command(command: Sequence[str]) -> str:
    import shlex  # lazy: only where a command is shown

    if len(command) == 3 and list(command[:2]) == ["/bin/sh", "-c"]:
        return terminal.safe(command[2])
    return terminal.safe(" ".join(shlex.quote(str(word)) for word in command))
