"""What a launcher has repaired of a working folder, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.control.ingest import validation

MOST = 20
"""Files of each kind that one entry may name."""


def said(entry: Mapping[str, Any], clean: validation.Clean = validation.same) -> list[str]:
    """One text for each file. Raises ValueError or TypeError for an entry that no launcher wrote."""
    died = "was killed" if entry.get("violent", True) else "ended"
    ended = validation.moment(entry.get("at"))
    found = []
    for item in _list(entry, "put_back"):
        if not isinstance(item, dict):
            raise ValueError("not a file that was put back")
        age = _age(ended - validation.moment(item.get("written_at")))
        what = f"{_name(item.get('path'), clean)} was being written when the process {died}"
        found.append(f"{what}; put back to the version written {age} before")
    for path in _list(entry, "torn"):
        name = _name(path, clean)
        found.append(
            f"{name} was being written when the process {died}, and no complete version of it is kept; "
            f"it is set aside as {name}.torn"
        )
    return found


def _list(entry: Mapping[str, Any], key: str) -> list[Any]:
    value = entry.get(key)
    if not isinstance(value, list):
        raise ValueError(f"{key} is not a list")
    return value[:MOST]


def _name(path: object, clean: validation.Clean) -> str:
    if not isinstance(path, str):
        raise ValueError("not a path")
    return validation.text(path, validation.NAME, clean)


def _age(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36000 else f"{seconds / 3600:.0f} h"
