"""The secrets of runs: secrets/HASH.json, 0600, from submit until the run is terminal. Nowhere else on disk but
in the task directory while the task lives."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from stoker.settings import Home
from stoker.task.formats import write_json


def save(home: Home, key: str, values: dict[str, str]) -> None:
    """Durable before the submit is acknowledged."""
    home.secrets.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json(str(_path(home, key)), values, mode=0o600, durable=True)


def exist(home: Home, key: str) -> bool:
    return _path(home, key).exists()


def load(home: Home, key: str) -> dict[str, str]:
    try:
        raw = json.loads(_path(home, key).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return {str(name): str(value) for name, value in raw.items()}


def forget(home: Home, key: str) -> None:
    _path(home, key).unlink(missing_ok=True)


def _path(home: Home, key: str) -> Path:
    return home.secrets / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
