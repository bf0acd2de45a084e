"""A run's secrets are taken out of all that its tasks say, before it is kept: names of metrics and checkpoints, the text of
events, how a body ended. The launcher does the same with the log. Files of a checkpoint get their names back when it is
restored.

A name is always replaced by the same one, so that rows of different looks and servers belong together, and two secrets
in one place are two names. What has been cleaned is not changed by being cleaned again.
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
    """Of one run. Any thread."""

    def __init__(self, secrets: Mapping[str, str] | None = None) -> None:
        self._marks: dict[str, str] = {}
        for name, value in sorted((secrets or {}).items()):
            lines = [line.strip() for line in value.splitlines()]
            for number, line in enumerate(lines, start=1):
                if len(line) >= SHORTEST_SECRET:
                    mark = f"[secret {name}]" if len(lines) == 1 else f"[secret {name}:{number}]"
                    self._marks.setdefault(line, mark)
        self._names = {mark: value for value, mark in self._marks.items() if "/" not in value}
        # The longest first: one that contains another must not leave its rest behind.
        values = sorted(self._marks, key=lambda value: (-len(value), value))
        self._pattern = re.compile("|".join([*map(re.escape, values), _MARK])) if values else None
        self.text = lru_cache(maxsize=1024)(self._text)

    def __bool__(self) -> bool:
        """Whether there is anything to take out."""
        return self._pattern is not None

    def _text(self, text: str) -> str:
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: self._marks.get(found[0], found[0]), text)

    def value(self, value: Any) -> Any:
        """The same for all text in plain values, names of fields included."""
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
        """What is to be recorded, its words cleaned: they may quote the path of a file."""
        return changes if self._pattern is None else [self._change(change) for change in changes]

    def _change(self, change: Change) -> Change:
        if isinstance(change, AddEvent):
            row = change.row
            return AddEvent(replace(row, text=self._text(row.text), data=self.value(row.data)))
        if isinstance(change, UpdateRun) and "reason" in change.values:
            return replace(change, values={**change.values, "reason": self._text(change.values["reason"])})
        return change

    def original(self, name: str) -> str:
        """The name of a file, as the run knows it: what was taken out is put back. By now that may be another value."""
        found = _MARKS.sub(lambda mark: self._names.get(mark[0], mark[0]), name)
        return found if len(found.encode("utf-8", "replace")) <= MAX_COMPONENT else name


NOTHING = Redaction()
"""For a run without secrets."""
