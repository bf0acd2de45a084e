"""Removes a run's secrets from the output of its tasks before it is recorded: names of metrics and checkpoints, texts of
events, endings. The launcher does the same for the log. A restore gives the files of a checkpoint their names back.

A secret is always replaced by the same mark, so rows of different looks and servers match. Different secrets get
different marks. Cleaning twice changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from stoker.spec.tree import MAX_COMPONENT
from stoker.store.rows import AddEvent, Change, UpdateRun
from stoker.task.formats import SHORTEST_SECRET

_MARK = r"\[secret [A-Za-z0-9_]+(?::\d+)?\]"
_MARKS = re.compile(_MARK)


class Redaction:
    """The secrets of one run. Thread-safe."""

    def __init__(self, secrets: Mapping[str, str] | None = None) -> None:
        self._marks: dict[str, str] = {}
        for name, value in sorted((secrets or {}).items()):
            lines = [line.strip() for line in value.splitlines()]
            for number, line in enumerate(lines, start=1):
                if len(line) >= SHORTEST_SECRET:
                    mark = f"[secret {name}]" if len(lines) == 1 else f"[secret {name}:{number}]"
                    self._marks.setdefault(line, mark)
        self._names = {mark: value for value, mark in self._marks.items() if "/" not in value}
        # The longest first: a secret that contains another one must be replaced as a whole.
        values = sorted(self._marks, key=lambda value: (-len(value), value))
        self._pattern = re.compile("|".join([*map(re.escape, values), _MARK])) if values else None
        self.text = lru_cache(maxsize=1024)(self._text)

    def __bool__(self) -> bool:
        """Whether there are secrets."""
        return self._pattern is not None

    def _text(self, text: str) -> str:
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: self._marks.get(found[0], found[0]), text)

    def value(self, value: Any) -> Any:
        """Clean all text in JSON values, including the names of fields."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.value(item) for item in value)
        return value

    def changes(self, changes: Sequence[Change]) -> Sequence[Change]:
        """Clean the texts of events and reasons, which may quote the path of a file."""
        return changes if self._pattern is None else [self._change(change) for change in changes]

    def _change(self, change: Change) -> Change:
        if isinstance(change, AddEvent):
            row = change.row
            return AddEvent(replace(row, text=self._text(row.text), data=self.value(row.data)))
        if isinstance(change, UpdateRun) and "reason" in change.values:
            return replace(change, values={**change.values, "reason": self._text(change.values["reason"])})
        return change

    def original(self, name: str) -> str:
        """The original name of a file: marks are replaced by the secrets. These may have changed since."""
        found = _MARKS.sub(lambda mark: self._names.get(mark[0], mark[0]), name)
        return found if len(found.encode("utf-8", "replace")) <= MAX_COMPONENT else name


NOTHING = Redaction()
"""Redaction of a run without secrets."""
