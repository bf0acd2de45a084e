"""Accounts for every key of a document.

A view is opened on each mapping that Stoker reads; keys read through it count as taken. At the end, the keys left in
any view are looked up in the table of rows. Harmless keys are silent and the others become notes, also a key that has
no row. So no key can be overlooked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from stoker.errors import SpecError
from stoker.spec import problems
from stoker.spec.interop.rows import BY_SCOPE, Does
from stoker.spec.problems import Problem, nearest, show
from stoker.spec.quantities import Bad
from stoker.spec.yaml12 import Mark

At = tuple[str | int, ...]
T = TypeVar("T")
_EMPTY = (None, False, "", 0)


class Level(StrEnum):
    """What a note means for the submit."""

    SAID = "said"
    """Done in another way with the same effect. Only reported."""
    IGNORED = "ignored"
    """Cannot be honoured. Refused unless the user accepts that (`--lenient`)."""
    REFUSED = "refused"
    """Reaches beyond the pod. The user may not decide this."""


@dataclass(frozen=True)
class Note:
    """An entry of the file that is not done as written."""

    path: str
    line: int
    value: str
    why: str
    level: Level = Level.IGNORED

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "line": self.line,
            "value": self.value,
            "why": self.why,
            "level": str(self.level),
        }


@dataclass
class Ledger:
    """The account of one document."""

    source: str
    marks: Mapping[At, Mark]
    notes: list[Note] = field(default_factory=list)
    mistakes: list[Problem] = field(default_factory=list)
    _views: list[View] = field(default_factory=list)

    def view(self, value: Any, path: At, scope: str) -> View:
        """A view of a mapping whose keys are those of `scope`; an empty one where the value is no mapping."""
        if not isinstance(value, Mapping):
            if value is not None:
                self.mistake(path, f"is {show(value)}, not a mapping")
            value = {}
        found = View(self, value, path, scope)
        self._views.append(found)
        return found

    def line(self, path: At) -> int:
        for length in range(len(path), -1, -1):
            if (mark := self.marks.get(path[:length])) is not None:
                return mark.line
        return 1

    def note(self, path: At, value: Any, why: str, level: Level = Level.IGNORED) -> None:
        self.notes.append(Note(Problem(path, "").key, self.line(path), shown(value), why, level))

    def mistake(self, path: At, message: str, hint: str | None = None, value: Any = None) -> None:
        # Paths in manifests are long, and their ends say most: the whole path is shown.
        key = "".join(char if char.isprintable() else "?" for char in Problem(path, "").key)
        whole = f"{key}: {message}" if key else message
        self.mistakes.append(Problem(path, whole, hint=hint, value=value, named=True))

    def checked(self, path: At, read: Callable[[Any], T], value: Any) -> T | None:
        """The value as `read` returns it; None, and a mistake, where `read` refuses it."""
        try:
            return read(value)
        except Bad as exc:
            self.mistake(path, exc.message, exc.hint, value)
            return None

    def close(self) -> tuple[Note, ...]:
        """Accounts for the keys that were not taken. Raises SpecError with all mistakes."""
        for view in self._views:
            view.close()
        if self.mistakes:
            placed = [problems.place(problem, self.source, self.marks, {}) for problem in self.mistakes]
            raise problems.combine(placed, self.source)
        return tuple(sorted(self.notes, key=lambda note: note.line))


class View:
    """A mapping of the document. `at` is its path."""

    def __init__(self, ledger: Ledger, value: Mapping[str, Any], at: At, scope: str) -> None:
        self.ledger = ledger
        self.value = value
        self.at = at
        self.scope = scope
        self._taken: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self.value.get(key) is not None

    def path(self, key: str | int) -> At:
        return (*self.at, key)

    def take(self, key: str) -> Any:
        """The whole value, which the caller accounts for."""
        assert key in BY_SCOPE[self.scope], (self.scope, key)
        self._taken.add(key)
        return self.value.get(key)

    def whole(self) -> None:
        """The caller accounts for everything in it."""
        self._taken.update(self.value)

    def text(self, key: str) -> str | None:
        value = self.take(key)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, (dict, list)):
            self.ledger.mistake(self.path(key), f"is {show(value)}, not text")
            return None
        return show(value)

    def number(self, key: str, read: Callable[[Any], T]) -> T | None:
        value = self.take(key)
        return None if value is None else self.ledger.checked(self.path(key), read, value)

    def switch(self, key: str) -> bool | None:
        value = self.take(key)
        if value is None or isinstance(value, bool):
            return value
        self.ledger.mistake(self.path(key), f"{show(value)} is not true or false", "Write `true` or `false`.")
        return None

    def strings(self, key: str) -> list[str] | None:
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(isinstance(one, (dict, list)) or one is None for one in value):
            hint = "Write it as in `[python, train.py]`."
            self.ledger.mistake(self.path(key), f"is {show(value)}, not a list of words", hint)
            return None
        return [one if isinstance(one, str) else show(one) for one in value]

    def child(self, key: str, scope: str) -> View:
        """The mapping below a key."""
        return self.ledger.view(self.take(key), self.path(key), scope)

    def items(self, key: str, scope: str) -> Iterator[View]:
        """The mappings of a list below a key."""
        value = self.take(key)
        if value is not None and not isinstance(value, list):
            self.ledger.mistake(self.path(key), f"is {show(value)}, not a list")
            return
        for number, item in enumerate(value or ()):
            yield self.ledger.view(item, (*self.at, key, number), scope)

    def note(self, key: str, why: str, level: Level = Level.IGNORED) -> None:
        self._taken.add(key)
        self.ledger.note(self.path(key), self.value.get(key), why, level)

    def mistake(self, key: str, message: str, hint: str | None = None) -> None:
        self.ledger.mistake(self.path(key), message, hint, self.value.get(key))

    def close(self) -> None:
        rows = BY_SCOPE[self.scope]
        for key, value in self.value.items():
            if key in self._taken or (isinstance(value, (dict, list)) and not value) or value in _EMPTY:
                continue
            row = rows.get(key)
            if row is None:
                near = nearest(key, tuple(rows))
                more = f"; did you mean `{near}`?" if near else ""
                self.ledger.note(self.path(key), value, f"is not a key that is known here{more}")
            elif row.does is Does.SAID:
                self.ledger.note(self.path(key), value, row.words, Level.SAID)
            elif row.does is Does.REFUSED:
                self.ledger.note(self.path(key), value, row.words, Level.REFUSED)
            elif row.does is not Does.HARMLESS:
                self.ledger.note(self.path(key), value, row.words)


def shown(value: Any) -> str:
    """A value on one short line."""
    text = problems.flow(value) if isinstance(value, (Mapping, list, tuple)) else show(value)
    return text if len(text) <= 60 else text[:57] + "..."


def file_error(source: str, line: int | None, what: str, hint: str | None = None) -> SpecError:
    where = f"{source}:{line}" if line else source
    place = {"file": source, "line": line}
    return SpecError(
        f"{where}: {what}", hint=hint, details={**place, "errors": [{**place, "message": what, "hint": hint}]}
    )
