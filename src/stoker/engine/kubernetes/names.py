"""Names and labels of Stoker's objects in a cluster.

Names are deterministic: submitting an attempt again, also after a crash, finds the objects that already exist.
Which attempt an object belongs to is read from its labels, never from its name.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.engine.change_feed import Key
from stoker.errors import EngineError
from stoker.settings import Home

LONGEST = 63
"""Length of a DNS label, and of a label's value."""

PREFIX = "stoker.dev/"
HOME = f"{PREFIX}home"
"""The server that owns the object: two servers that share a namespace never touch each other's objects."""
CLUSTER = f"{PREFIX}cluster"
RUN = f"{PREFIX}run"
ATTEMPT = f"{PREFIX}attempt"
TASK = f"{PREFIX}task"
INCARNATION = f"{PREFIX}incarnation"
MANAGED = "app.kubernetes.io/managed-by"

TASKS = f"{PREFIX}tasks"
"""Annotation of the Secret: {task: incarnation} that was requested."""
SUBMITTED = f"{PREFIX}submitted"
"""Annotation of the Secret: {task: incarnation} of created pods. If such a pod is absent, it was deleted."""
PLAIN = f"{PREFIX}launcher"
"""Annotation with the value `none` on an attempt without a launcher."""

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?")


def checked(run: str, *tasks: str) -> None:
    """Refuse invalid names: they become paths and labels."""
    for name in (run, *tasks):
        if not _NAME.fullmatch(name):
            raise EngineError(
                f"{name[:80]!r} cannot name a run or a task",
                hint="Use letters, digits, '-' and '_', at most 63 of them.",
            )


def secret_name(run: str, attempt: int) -> str:
    return _label(f"stoker-{run}-{attempt}")


def pod_name(run: str, attempt: int, task: str, incarnation: int) -> str:
    again = f"-r{incarnation}" if incarnation > 1 else ""
    return _label(f"{run}-{attempt}-{task}{again}")


def bundle_name(digest: str) -> str:
    return _label(f"stoker-bundle-{digest}")


def labels(home: str, cluster: str, run: str, attempt: int) -> dict[str, str]:
    """Labels of every object of an attempt."""
    return {
        MANAGED: "stoker",
        HOME: home,
        CLUSTER: cluster,
        RUN: run,
        ATTEMPT: str(attempt),
    }


def label_value(text: str) -> str:
    """The nearest valid label value, for people who search by label."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:LONGEST].strip("-_.")


def key_of(obj: Mapping[str, Any]) -> Key | None:
    """(run, attempt, task) of a pod of this server; None if its labels were changed by another program."""
    found = attempt_of(obj)
    task = _labels(obj).get(TASK, "")
    return None if found is None or not _NAME.fullmatch(task) else (*found, task)


def attempt_of(obj: Mapping[str, Any]) -> tuple[str, int] | None:
    """(run, attempt) of an object of this server."""
    found = _labels(obj)
    run, attempt = found.get(RUN, ""), found.get(ATTEMPT, "")
    if not _NAME.fullmatch(run) or not re.fullmatch(r"[0-9]{1,9}", attempt):
        return None
    return run, int(attempt)


def incarnation_of(obj: Mapping[str, Any]) -> int:
    text = _labels(obj).get(INCARNATION, "1")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 1


def _labels(obj: Mapping[str, Any]) -> Mapping[str, str]:
    return (obj.get("metadata") or {}).get("labels") or {}


def home_id(home: Home) -> str:
    """Names this home in labels. Random and kept in the home, because paths and machine names may repeat."""
    path = home.identity
    try:
        found = path.read_text().strip()
    except FileNotFoundError:
        found = ""
    if re.fullmatch(r"[a-z0-9]{12}", found):
        return found
    return _create(path)


def _create(path: Path) -> str:
    """Created once: if two processes do this together, the first one's identity counts for both."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = "".join(secrets.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(12))
    temporary = path.with_name(f"{path.name}.{made}.tmp")
    with temporary.open("w") as file:
        file.write(made + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)
    except FileExistsError:
        found = path.read_text().strip()
        if not re.fullmatch(r"[a-z0-9]{12}", found):
            temporary.replace(path)
            return made
        return found
    finally:
        temporary.unlink(missing_ok=True)
    return made


def _label(wanted: str) -> str:
    """A DNS label: the name itself if it is one, else the nearest one with a hash at the end."""
    name = re.sub(r"[^a-z0-9-]+", "-", wanted.lower())
    if name == wanted and len(name) <= LONGEST:
        return name
    mark = hashlib.sha256(wanted.encode()).hexdigest()[:8]
    return f"{name[: LONGEST - 9].rstrip('-')}-{mark}"
