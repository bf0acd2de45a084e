"""Changes one setting in config.toml and nothing else: comments and order belong to the user."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from stoker.errors import Conflict

_SECTION = re.compile(r"\s*\[server\]\s*(#.*)?")
_ANY_SECTION = re.compile(r"\s*\[")
_KEY = re.compile(r"\s*database\s*=")


def set_database(path: Path, url: str | None) -> None:
    """Writes `[server] database`, or removes it. Afterwards only the owner can read the file: URLs hold passwords."""
    text = path.read_text() if path.exists() else ""
    changed = with_database(text, url)
    if changed is None:
        raise Conflict(
            f"cannot change [server] database in {path}",
            hint="Set it there by hand; all other steps are done.",
        )
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(changed)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def with_database(text: str, url: str | None) -> str | None:
    """The same text with this setting; None when the text is written in a form that cannot be edited safely."""
    lines = text.splitlines(keepends=True)
    start = next((at for at, line in enumerate(lines) if _SECTION.fullmatch(line.rstrip("\r\n"))), None)
    entry = [] if url is None else [f"database = {json.dumps(url)}\n"]
    if start is None:
        gap = "" if not text or text.endswith("\n") else "\n"
        changed = f"{text}{gap}[server]\n{''.join(entry)}" if entry else text
    else:
        rest = range(start + 1, len(lines))
        end = next((at for at in rest if _ANY_SECTION.match(lines[at])), len(lines))
        kept = [line for line in lines[start + 1 : end] if not _KEY.match(line)]
        header = lines[start] if lines[start].endswith("\n") else lines[start] + "\n"
        changed = "".join([*lines[:start], header, *entry, *kept, *lines[end:]])
    return changed if _differs_only_there(text, changed, url) else None


def _differs_only_there(before: str, after: str, url: str | None) -> bool:
    try:
        wanted = tomllib.loads(before)
        found = tomllib.loads(after)
    except tomllib.TOMLDecodeError:
        return False
    server: dict[str, Any] = wanted.setdefault("server", {})
    server.pop("database", None)
    if url is not None:
        server["database"] = url
    found.setdefault("server", {})
    return wanted == found
