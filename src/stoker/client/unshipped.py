"""Whether a run died of a file that is on the submitting machine and was not shipped, and what to do. One sentence."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker.client.ignore import ALWAYS, NAMES, IgnoreRules, read_rules, rules_above
from stoker.errors import StokerError
from stoker.task import layout

LINES = 20
"""Last lines that are searched."""
_MISSING = (
    re.compile(r"No such file or directory: (?:b?'([^']+)'|b?\"([^\"]+)\")"),
    re.compile(r"FileNotFoundError: (?:Couldn't find |\[Errno 2\] )?['\"]?([^\s'\"]+)['\"]? (?:not found|does not exist)"),
    re.compile(r"^(?:[^\s:]+: )+(?:cannot open |cannot access |can't open )?['\"]?([^:'\"]+)['\"]?: No such file or directory"),
)  # fmt: skip


def explain(run: Mapping[str, Any]) -> str | None:
    """`run`: as the server shows it. None: it did not die of a missing path, or the path is not here either."""
    record, job = run.get("record") or {}, run.get("job") or {}
    attempts = run.get("attempts") or []
    workdir = record.get("workdir")
    if run.get("state") != "failed" or not attempts or not run.get("code") or not isinstance(workdir, str):
        return None
    if record.get("host") != os.uname().nodename or not Path(workdir).is_dir():
        return None
    path = missing_path((attempts[-1].get("evidence") or {}).get("last_lines") or [])
    if path is None:
        return None
    node = str(attempts[-1].get("node") or "local")
    where = "in the image" if job.get("image") else f"on {node}"
    elsewhere = bool(job.get("image")) or node != "local"
    try:
        return _reason(path, Path(os.path.realpath(workdir)), where if elsewhere else "", run)
    except (OSError, StokerError):
        return None  # the folder has changed, or its ignore files cannot be read: nothing is certain


def missing_path(lines: Sequence[str]) -> str | None:
    """The path that the last of these lines to name one calls missing."""
    for line in reversed(lines[-LINES:]):
        for pattern in _MISSING:
            if found := pattern.search(line.strip()):
                return next((group for group in found.groups() if group), None)
    return None


def _reason(path: str, workdir: Path, elsewhere: str, run: Mapping[str, Any]) -> str | None:
    """`elsewhere`: where the run was, if it did not see the files of this machine."""
    _, placed, inside = path.rpartition(f"/{layout.CODE}/")
    relative = inside if placed and path.startswith("/") and not os.path.lexists(path) else path
    full = Path(os.path.normpath(workdir / relative))
    if not full.exists():
        return None
    if full.is_relative_to(workdir):
        return _of_the_folder(relative, full.relative_to(workdir), workdir, run)
    if elsewhere:
        return (
            f"{path} is on this machine, outside the working folder, and not {elsewhere}: put it on a volume there "
            "and name it with `inputs` or `mounts`, or copy it into the folder."
        )
    if not path.startswith("/"):
        return (
            f"{path} is outside the working folder, which alone is shipped: write its full path, {full}, "
            f"or pass it with --input NAME=file://{full}."
        )
    return None


def _of_the_folder(shown: str, path: Path, workdir: Path, run: Mapping[str, Any]) -> str | None:
    found = _ignored(path, workdir)
    if found is None:
        if (workdir / path).stat().st_ctime > float(run.get("created_at") or 0):
            return f"{shown} was written here after the run was submitted: run it again."
        return None
    name, rules = found
    if not rules:
        return f"{shown} is here and was not shipped, because {Path(name).name} never is: move it to another folder."
    return (
        f"{shown} is here and was not shipped, because {rules} leaves out {name}: write `!/{name}` into "
        f".stokerignore to ship it, or pass it with --input NAME=file://{workdir / name}."
    )


def _ignored(path: Path, workdir: Path) -> tuple[str, str] | None:
    """The part of `path` that is not shipped, and the ignore file that says so (empty: it never is). None: it is shipped."""
    rules: IgnoreRules = rules_above(workdir)
    for depth in range(len(path.parts)):
        above = "/".join(path.parts[:depth])
        own = {name: read_rules(workdir / above / name) for name in NAMES}
        rules = rules.extended(above, {name: content for name, content in own.items() if content})
        name = "/".join(path.parts[: depth + 1])
        is_directory = (workdir / name).is_dir() and not (workdir / name).is_symlink()
        if path.parts[depth] in ALWAYS:
            return name, ""
        if (by := rules.ignored_by(name, is_directory)) is not None:
            return f"{name}/" if is_directory else name, by
    return None
