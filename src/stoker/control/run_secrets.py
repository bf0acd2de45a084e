"""The secrets of runs: secrets/HASH.json, mode 0600, from submit until the run is terminal. The only other copy on disk
is in the task directory while the task lives."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from stoker.errors import Refused
from stoker.settings import Home
from stoker.task.formats import write_json


def check(values: Mapping[str, str]) -> None:
    """Refuse values that cannot be environment variables. The message names the secret, never its value."""
    for name, value in values.items():
        problem = "has a NUL character in it" if "\0" in value else None
        try:
            value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            problem = "is not text"
        if problem:
            raise Refused(
                f"the value of secret {name} {problem}, which no environment variable can have",
                hint=f"Encode it, as base64 for instance, and have the script decode {name}.",
                details={"key": "secrets"},
            )


def save(home: Home, key: str, values: dict[str, str]) -> None:
    """Durable before the submit is acknowledged."""
    home.secrets.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json(str(_path(home, key)), values, mode=0o600, durable=True)


def exist(home: Home, key: str) -> bool:
    return _path(home, key).exists()


def load(home: Home, key: str) -> dict[str, str]:
    return _read(_path(home, key))


def every(home: Home) -> list[str]:
    """The secret values of all runs that are not over."""
    found: list[str] = []
    for path in home.secrets.glob("*.json"):
        found += _read(path).values()
    return found


def forget(home: Home, key: str) -> None:
    _path(home, key).unlink(missing_ok=True)


def _read(path: Path) -> dict[str, str]:
    try:
        raw = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return {str(name): str(value) for name, value in raw.items()}


def _path(home: Home, key: str) -> Path:
    return home.secrets / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
