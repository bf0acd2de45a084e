"""Mistakes in a job: found, described, located and combined into one error.

pydantic says which rule a value breaks. Here that becomes the key, the value, the nearest match and the fix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from stoker.errors import SpecError
from stoker.spec import keys
from stoker.spec.quantities import Bad, nearest, show
from stoker.spec.yaml12 import MAX_DEPTH, Mark

__all__ = ["Problem", "combine", "explain", "meant", "nearest", "place", "show", "without_nulls"]

At = tuple[str | int, ...]
_SHOWN = 20
_KEPT = 100
_SECRET = "(not shown)"


@dataclass(frozen=True)
class Problem:
    """One mistake. `path` is its key; the message follows the key's name."""

    path: At
    message: str
    hint: str | None = None
    value: Any = None
    choices: tuple[str, ...] = ()
    call: str | None = None
    """The flag or `--set` it came from."""
    named: bool = False
    """Whether `where` already names the key."""
    where: str = ""
    """`stoker.yaml:7` or the flag."""
    file: str | None = None
    mark: Mark | None = None

    @property
    def key(self) -> str:
        return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path).lstrip(".")

    @property
    def line(self) -> str:
        return ": ".join(part for part in (self.where, self._key_shown(), self.message) if part)

    def _key_shown(self) -> str:
        return "" if self.named else show(self.key)[1:-1]

    def to_json(self) -> dict[str, Any]:
        value = _SECRET if self.path[:1] == ("secrets",) and self.value is not None else self.value
        return {
            "file": self.file,
            "line": self.mark.line if self.mark else None,
            "column": self.mark.column if self.mark else None,
            "key": self.key or None,
            "value": _cut(value),
            "choices": list(self.choices),
            "given": self.call,
            "message": self.message,
            "hint": self.hint,
        }


def without_nulls(raw: Mapping[Any, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """A copy without the keys that have no value, and a mistake for each of them."""
    mistakes: list[Problem] = []

    def clean(value: Any, path: At) -> Any:
        if len(path) > MAX_DEPTH:
            raise SpecError(f"values are nested more than {MAX_DEPTH} deep", hint="A job needs five.")
        if isinstance(value, Mapping):
            found = {}
            for key, child in value.items():
                here = (*path, str(key))
                if child is None:
                    mistakes.append(_null(here))
                else:
                    found[str(key)] = clean(child, here)
            return found
        if isinstance(value, (list, tuple)):
            for number, child in enumerate(value):
                if child is None:
                    mistakes.append(_null((*path, number)))
            return [clean(child, (*path, number)) for number, child in enumerate(value) if child is not None]
        return value

    return clean(raw, ()), mistakes


def explain(exc: ValidationError) -> list[Problem]:
    """pydantic's errors as Problems, in the order of the tree."""
    return [_explain(dict(error)) for error in exc.errors(include_url=False)]


def place(problem: Problem, source: str | None, marks: Mapping[At, Mark], given: Mapping[At, str]) -> Problem:
    """Finds where the mistake was made: the flag it came from, else the nearest line."""
    if problem.call:
        return replace(problem, where=problem.call, named=True)
    for length in range(len(problem.path), 0, -1):
        call = given.get(problem.path[:length])
        if call is not None:
            named = all(isinstance(part, int) for part in problem.path[length:])
            return replace(problem, where=call, call=call, named=named)
        if problem.path[:length] in marks:
            break
    beneath = [call for path, call in given.items() if path[: len(problem.path)] == problem.path]
    if problem.path and problem.path not in marks and beneath:
        return replace(problem, where=beneath[0], call=beneath[0])
    for length in range(len(problem.path), -1, -1):
        mark = marks.get(problem.path[:length])
        if mark is not None:
            return replace(problem, file=source, mark=mark, where=f"{source}:{mark.line}" if source else "")
    return replace(problem, file=source, where=source or "")


def combine(mistakes: Sequence[Problem], source: str | None) -> SpecError:
    """One error for all mistakes, in the order of the file."""
    ordered = sorted(mistakes, key=lambda m: (m.mark.line, m.mark.column) if m.mark else (1 << 30, 0))
    errors = [problem.to_json() for problem in ordered[:_KEPT]]
    first = ordered[0]
    details = {name: errors[0][name] for name in ("file", "line", "key", "value", "choices")} | {
        "errors": errors
    }
    if len(ordered) == 1:
        return SpecError(first.line, hint=first.hint, details=details)
    lines = [f"{len(ordered)} mistakes in {source or 'the job'}"]
    for problem in ordered[:_SHOWN]:
        lines.append(f"  {problem.line}")
        if problem.hint:
            lines.append(f"    hint: {problem.hint}")
    if len(ordered) > _SHOWN:
        lines.append(f"  and {len(ordered) - _SHOWN} more")
    return SpecError("\n".join(lines), details=details)


def _explain(error: dict[str, Any]) -> Problem:
    path: At = tuple(error["loc"])
    kind = error["type"]
    if path and path[-1] == "[key]":
        path = path[:-1]
    value = error.get("input")
    cause = (error.get("ctx") or {}).get("error")
    if isinstance(cause, Bad):
        if not path and cause.message.startswith("run: "):
            return Problem(("run",), cause.message[5:], cause.hint)
        if not path and cause.message.startswith("workers: "):
            return Problem(("workers",), cause.message[9:], cause.hint)
        if not path and cause.message.startswith("roles."):
            name, _, message = cause.message.removeprefix("roles.").partition(": ")
            return Problem(("roles", name), message, cause.hint)
        return Problem(path, cause.message, cause.hint, value, cause.choices)
    if kind == "extra_forbidden":
        return _unknown_key(path)
    if kind == "missing":
        return _missing(path)
    key = keys.find(path)
    shown = "this" if path[:1] == ("secrets",) else show(value)
    if kind in ("model_type", "model_attributes_type", "dict_type", "mapping_type"):
        return Problem(path, f"{shown} is not a mapping of keys", _example(key, path, value), value)
    if kind in ("tuple_type", "list_type"):
        return Problem(path, f"{shown} is not a list", _list_hint(key, path, value), value)
    return Problem(path, f"{shown}: {str(error['msg'])[:1].lower()}{str(error['msg'])[1:]}", None, value)


def meant(word: str, parent: At = ()) -> str | None:
    """The key that `word` probably means in the mapping at `parent`; dotted where it lies deeper."""
    home = keys.WRONG_KEYS.get(word.lower())
    if len(parent) == 2 and parent[0] == "roles":
        own = keys.ROLE_KEYS.get(word.lower()) or home
        if own in keys.children(parent):
            return own
    prefix = "".join(f"{part}." for part in parent)
    if home is not None and home.startswith(prefix):
        return home.removeprefix(prefix)
    return nearest(word, keys.children(parent))


def _unknown_key(path: At) -> Problem:
    word, parent = str(path[-1]), path[:-1]
    choices = keys.children(parent)
    prefix = "".join(f"{part}." for part in parent)
    near = meant(word, parent)
    elsewhere = [
        k.path for k in keys.KEYS if k.parts[-1] == word and "*" not in k.path and k.path != prefix + word
    ]
    if near is None and elsewhere:
        there = elsewhere[0].rpartition(".")[0]
        where = f"under `{there}`" if there else "at the top level"
        hint = f"`{word}` belongs {where}."
    elif near is not None and "." in near:
        there, _, leaf = near.rpartition(".")
        hint = f"Did you mean `{leaf}`, under `{there}`?"
    elif near is not None:
        hint = f"Did you mean `{near}`?"
    else:
        hint = f"Keys: {', '.join(choices)}."
    return Problem(path, "no such key", hint, None, choices)


def _missing(path: At) -> Problem:
    key = keys.find(path)
    if key is None:
        return Problem(path, "is missing")
    choices = f" Choices: {', '.join(key.choices)}." if key.choices else ""
    return Problem(
        path, "is missing", f"Add it, as in `{path[-1]}: {key.example}`.{choices}", None, key.choices
    )


def _null(path: At) -> Problem:
    key = keys.find(path)
    if key is not None and key.kind == "variables" and len(path) > 1:
        return Problem(path, "has no value", 'Write `""` for an empty value.')
    if key is not None and key.path == ".".join(str(part) for part in path):
        return Problem(
            path, "has no value", f"Write one, as in `{path[-1]}: {flow(key.example)}`, or remove the line."
        )
    return Problem(path, "has no value", "Write one, or remove the line.")


def _example(key: keys.Key | None, path: At, value: Any) -> str | None:
    if key is not None and key.path == "roles" and len(path) == 2:
        return f"Write it as in `{path[-1]}: {{count: {value if type(value) is int else 2}}}`."
    if key is not None and key.path == "hang" and isinstance(value, (str, int, float)):
        return f"Did you mean `hang: {{after: {flow(value)}}}`?"
    if key is None or not isinstance(key.example, dict):
        return None
    return f"Write it as in `{path[-1]}: {flow(key.example)}`."


def _list_hint(key: keys.Key | None, path: At, value: Any) -> str | None:
    if isinstance(value, str) and path[:1] != ("secrets",) and len(value) <= 60 and value.isprintable():
        words = [word for word in value.replace(",", " ").split() if word]
        return f"Did you mean `{path[-1]}: [{', '.join(words)}]`?"
    return f"Write it as in `{path[-1]}: {flow(key.example)}`." if key else None


def flow(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    return show(value) if isinstance(value, bool) else str(value)


def _cut(value: Any) -> Any:
    """A value for the details of an error: short, and valid JSON (no NaN, no lone surrogates)."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return value if abs(value) < 1 << 53 else show(value)
    if isinstance(value, str):
        short = value if len(value) <= 200 else value[:197] + "..."
        return short.encode("utf-8", "replace").decode()
    return show(value)
