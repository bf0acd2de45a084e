"""`shell`: a shell (or one command) with the environment, the directory and the limits of a task.

It runs inside the task's container or namespaces, while a launcher holds them. The launcher neither sees nor ends the processes
started here, but they count towards the task's limits.
"""

from __future__ import annotations

import os
import sys
from typing import List, Sequence

from stoker.launcher import bundle, task_files
from stoker.launcher.process import build_env, spawn
from stoker.task import layout
from stoker.task.formats import Order, TaskInfo

CANNOT = 126
NO_TASK = 66


def enter(directory: str, command: Sequence[str]) -> int:
    """Execute the command, or a shell. Returns only on failure."""
    try:
        info = TaskInfo.from_json(task_files.read_json(os.path.join(directory, layout.TASK)) or {})
        order = _order(directory)
        env = spawn.environment(directory, info, order, spawn.read_secrets(directory, info), bundle.own())
        if order.setup:
            env = build_env.activated(spawn.setup_directory(order.setup, info), env)
        env.setdefault("TERM", os.environ.get("TERM", "dumb"))
        for path in (info.cgroup or {}).get("procs", []):
            spawn.join(path)
        code = os.path.join(directory, layout.CODE)
        os.chdir(spawn.working_directory(code, info, order, spawn.has_code(code)))
    except (OSError, TypeError) as exc:
        print(f"stoker shell: {directory} cannot be entered: {exc}", file=sys.stderr)
        return NO_TASK
    argv = list(command) or _shell(env.get("SHELL"))
    try:
        spawn.execute(argv, env)
    except OSError as exc:
        print(f"stoker shell: {argv[0]}: {exc.strerror}", file=sys.stderr)
        return CANNOT


def _order(directory: str) -> Order:
    """The newest order. A task without one, or with a stop order, gets the values that every order has."""
    raw = task_files.read_json(os.path.join(directory, layout.ORDER))
    found = Order.from_json(raw) if raw is not None else Order(0, 0, "run")
    return (
        found if found.env or found.inherit else Order(found.seq, found.generation, found.verb, inherit=True)
    )


def _shell(preferred: "str | None") -> List[str]:
    for path in (preferred, "/bin/bash", "/usr/bin/bash", "/bin/sh"):
        if path and os.access(path, os.X_OK):
            return [path, "-i"]
    return ["sh", "-i"]
