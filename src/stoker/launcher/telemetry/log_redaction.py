"""Removes secrets from what a body prints, before it reaches the log."""

from __future__ import annotations

from typing import Iterable, Tuple

from stoker.task import formats


class Redactor:
    """Replaces secret values in text by their names. Each line of a secret of several lines is a value."""

    def __init__(self, secrets: Iterable[Tuple[str, str]] = ()) -> None:
        found = set()
        for name, value in secrets:
            for part in value.splitlines():
                part = part.strip()
                if len(part) >= formats.SHORTEST_SECRET:
                    found.add((part.encode("utf-8", "surrogateescape"), f"[secret {name}]".encode()))
        self.values = sorted(found, key=lambda pair: (-len(pair[0]), pair))

    def __call__(self, text: bytes) -> bytes:
        for value, name in self.values:
            if value in text:
                text = text.replace(value, name)
        return text
