"""No regular expression of Stoker takes more than linear time for any text.

All are found in the source. Each gets text that is hard for it: many repetitions of what one of its repeats
matches, then a character that does not match.
"""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import re
import re._constants as codes  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "stoker"
METHODS = ("match", "fullmatch", "search", "sub", "split", "findall", "finditer")
FUNCTIONS = {
    ("engine/kubernetes/config.py", "_matching"): "fullmatch",
    ("spec/quantities.py", "_short"): "fullmatch",
}
"""Ours that are given a pattern, and what they do with it."""
EXCEPTIONS = {
    (
        "task/checkpoint_names.py",
        r"[-_=](\d+)(?:\.[A-Za-z]\w*)*$",
    ): "a name in a directory, of at most 255 bytes",
    (
        "control/ingest/redaction.py",
        "dynamic",
    ): "secrets, escaped, and marks, each of which ends before the next begins",
    ("spec/interop/expansion.py", "dynamic"): "a literal, escaped",
    ("engine/kubernetes/config.py", "dynamic"): "see FUNCTIONS",
    ("spec/quantities.py", "dynamic"): "see FUNCTIONS",
}
LENGTHS = (500, 2000)


@dataclass(frozen=True)
class Use:
    file: str
    pattern: str | bytes
    flags: int
    method: str

    @property
    def run(self) -> Callable[[Any], object]:
        compiled = re.compile(self.pattern, self.flags)
        if self.method == "sub":
            return functools.partial(compiled.sub, b"" if isinstance(self.pattern, bytes) else "")
        if self.method == "finditer":
            return lambda text: list(compiled.finditer(text))
        return getattr(compiled, self.method)


# -- finding them -------------------------------------------------------------------------------------------------


def uses() -> Iterator[Use]:
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        text = path.read_text()
        if "import re\n" in text and not file.startswith("testing/"):
            yield from uses_in(file, ast.parse(text), text)


def uses_in(file: str, tree: ast.Module, text: str) -> Iterator[Use]:
    place = vars(
        importlib.import_module(
            "stoker." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        )
    )
    named = {
        id(node.value): target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = ast.unparse(call.func)
        if (file, function) in FUNCTIONS:
            methods = [FUNCTIONS[file, function]]
        elif function.startswith("re.") and function[3:] in METHODS:
            methods = [function[3:]]
        elif function == "re.compile":
            # A pattern stored elsewhere, as in a tuple, may be used in any way; a search is the slowest.
            methods = sorted(methods_of().get(named.get(id(call), ""), {"search"}))
        else:
            continue
        flags = [
            part
            for part in [*call.args[1:], *(one.value for one in call.keywords)]
            if "re." in ast.unparse(part)
        ]
        try:
            pattern = value(call.args[0], place)
        except NameError:
            assert (file, "dynamic") in EXCEPTIONS, (
                f"{file}:{call.lineno}: a pattern that is only made when it runs"
            )
            continue
        if (file, pattern) not in EXCEPTIONS:
            for method in methods:
                yield Use(file, pattern, int(value(flags[0], place)) if flags else 0, method)


def value(node: ast.expr, place: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), "pattern", "eval"), place)


@functools.cache
def methods_of() -> dict[str, set[str]]:
    """From the name of a compiled pattern to the methods called on it anywhere."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for name, method in re.findall(rf"\b([A-Z_]+)\.({'|'.join(METHODS)})\b", path.read_text()):
            found.setdefault(name, set()).add(method)
    return found


# -- hard texts -------------------------------------------------------------------------------------------------

ONE = (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN)
REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)


def members(kind: Any, what: Any) -> list[str]:
    """Some of the characters that one item of a pattern matches."""
    if kind is codes.LITERAL:
        return [chr(what)]
    if kind is codes.ANY:
        return ["a", " "]
    excluded = kind is codes.NOT_LITERAL or what[0][0] is codes.NEGATE
    found: list[str] = []
    for part, of in [(codes.LITERAL, what)] if kind is codes.NOT_LITERAL else what:
        if part is codes.LITERAL:
            found.append(chr(of))
        elif part is codes.RANGE:
            found += [chr(of[0]), chr(of[1])]
        elif part is codes.CATEGORY:
            found += {codes.CATEGORY_DIGIT: "0", codes.CATEGORY_SPACE: " \n", codes.CATEGORY_WORD: "a0_"}.get(
                of, "a !"
            )
    return [char for char in "aA0 \n-.\"'" if char not in found] if excluded else found[:6]


def sample(items: Any, variant: int) -> str:
    """Text that these items match."""
    text = ""
    for kind, what in items:
        if kind in ONE:
            choices = members(kind, what)
            text += choices[variant % len(choices)] if choices else ""
        elif kind in REPEATS:
            text += sample(what[2], variant) * max(what[0], 1 - variant % 2)
        elif kind is codes.SUBPATTERN:
            text += sample(what[3], variant)
        elif kind is codes.BRANCH:
            text += sample(what[1][variant % len(what[1])], variant)
    return text


def repeats(items: Any, before: list[Any]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Each unbounded repeat: the items before it, and the repeated items."""
    items = list(items)
    for number, (kind, what) in enumerate(items):
        here = before + items[:number]
        if kind in REPEATS:
            if what[1] is codes.MAXREPEAT or what[1] >= LENGTHS[0]:
                yield here, list(what[2])
            yield from repeats(what[2], here)
        elif kind is codes.SUBPATTERN:
            yield from repeats(what[3], here)
        elif kind is codes.BRANCH:
            for branch in what[1]:
                yield from repeats(branch, here)
        elif kind in (codes.ASSERT, codes.ASSERT_NOT):
            yield from repeats(what[1], here)


def hostile(use: Use) -> Iterator[tuple[str, str, str]]:
    """Beginnings, repeated parts, and ends."""
    tree = parser.parse(use.pattern, use.flags)
    found = list(repeats(tree, []))
    starts = {""} | {sample(before, variant) for before, _ in found for variant in (0, 1)}
    pumps = {sample(body, variant) for _, body in found for variant in range(4)} | {" ", "\n", "a", "0"}
    if use.method not in ("match", "fullmatch"):
        # A failed search starts again one character later.
        pumps |= {sample(before + body, variant) for before, body in found for variant in (0, 1)}
        pumps |= {sample(before, variant) for before, _ in found for variant in (0, 1)}
    return itertools.product(sorted(starts), sorted(pumps - {""}), ("", "\n\0!")) if found else iter(())


def cost(use: Use, start: str, pump: str, end: str, length: int, times: int = 1) -> float:
    text: str | bytes = start + pump * (length // len(pump) + 1) + end
    if isinstance(use.pattern, bytes):
        text = text.encode("latin-1", "replace") if isinstance(text, str) else text
    run, found = use.run, []
    for _ in range(times):
        began = time.process_time()
        run(text)
        found.append(time.process_time() - began)
    return min(found)


def grows(use: Use, start: str, pump: str, end: str) -> bool:
    """Whether four times the text takes much more than four times as long."""
    for length in range(12, 33, 4):
        # A machine that is busy can make one call long, not three.
        if cost(use, start, pump, end, length) > 0.05 and cost(use, start, pump, end, length, 3) > 0.05:
            return True  # exponential: longer text would never end
    for length in LENGTHS:
        if cost(use, start, pump, end, length) > 0.001 and (
            cost(use, start, pump, end, length, 3) > 9 * cost(use, start, pump, end, length // 4, 3)
        ):
            return True
    return False


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (r"(a+)+$", "match"),
        (r"^\s*[{\[,]*\s*kind", "search"),
        (r"[a-z]+=", "search"),
        (r"(a|a)*b", "fullmatch"),
        (r"[+-]?[0-9]*\.?[0-9]+", "fullmatch"),
        (r"\w+\s*\w+!", "match"),
    ],
)
def test_slow_patterns_are_detected(pattern: str, method: str) -> None:
    use = Use("", pattern, 0, method)
    assert any(grows(use, *text) for text in hostile(use))


def test_none_takes_more_than_linear_time() -> None:
    found = sorted(set(uses()), key=repr)
    assert len(found) > 120 and {one.method for one in found} == set(METHODS)
    wrong = {use: next((text for text in hostile(use) if grows(use, *text)), None) for use in found}
    assert {use: text for use, text in wrong.items() if text is not None} == {}
