"""Command lines that open a shell in an existing task. Pure, except for the search for `nsenter`."""

from __future__ import annotations

import os
import shutil
import sys

from stoker.engine.local.containers import commands
from stoker.engine.local.containers.commands import Runtime
from stoker.engine.local.tasks.registry import LocalTask
from stoker.task import container_layout


def argv(launcher: int, directory: str, bundle: str) -> list[str]:
    """Enters the namespaces of the launcher if it has its own. The launcher's code does the rest: environment,
    directory, limits."""
    inside = container_layout.command(bundle, "shell", directory, python=sys.executable)
    program = shutil.which("nsenter")
    kinds = [kind for kind in ("user", "mnt", "pid") if _differs(launcher, kind)]
    if not kinds or program is None:
        return inside
    flags = {"user": ["--user", "--preserve-credentials"], "mnt": ["--mount"], "pid": ["--pid"]}
    words = [word for kind in kinds for word in flags[kind]]
    return [program, "--target", str(launcher), *words, "--", *inside]


def container_argv(runtime: Runtime, known: LocalTask, bundle: str) -> list[str]:
    return commands.enter(runtime, known.container, container_layout.command(bundle, "shell", known.path))


def _differs(launcher: int, kind: str) -> bool:
    try:
        return os.readlink(f"/proc/{launcher}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")  # noqa: PTH115
    except OSError:
        return False
