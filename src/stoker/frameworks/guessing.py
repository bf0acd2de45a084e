"""Guesses which framework a script uses from its imports. The script is read, never run; an unclear case gives none.

A strong sign is something that only distributed training needs (`torch.distributed`, `mpi4py`). A weak one is the
framework itself. The guess is the single framework with strong signs or, without strong signs, the single one with
weak signs. Two frameworks give no guess: preparing data with Dask for torch is neither.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stoker.frameworks.commands import calls_torchrun, program, script

Read = Callable[[str], str | None]
"""The text of a shipped file by its path, relative to the working directory; None: there is no such file."""

MOST_FILES = 64
LONGEST = 1 << 20
"""Characters of one file."""

_STRONG = {
    "horovod": "horovod",
    "mpi4py": "mpi",
    "torch.distributed": "torch",
    "torch.nn.parallel": "torch",
    "lightning": "torch",
    "pytorch_lightning": "torch",
    "accelerate": "torch",
    "deepspeed": "torch",
    "tensorflow.distribute": "tensorflow",
    "jax.distributed": "jax",
    "stoker.jax_initialize": "jax",
    "dask.distributed": "dask",
    "distributed": "dask",
}
_WEAK = {"torch": "torch", "tensorflow": "tensorflow", "jax": "jax", "flax": "jax", "dask": "dask"}
_COMMANDS = {"mpirun": "mpi", "mpiexec": "mpi", "horovodrun": "horovod", "accelerate": "torch"}


@dataclass(frozen=True)
class Guess:
    framework: str | None
    """None: the signs disagree."""
    why: str
    """`train.py imports torch.distributed`"""


def guess(argv: Sequence[str], read: Read) -> Guess | None:
    """None: there are no signs."""
    name = program(argv)
    if name in _COMMANDS or calls_torchrun(argv):
        name = name if name in _COMMANDS else "torchrun"
        return Guess(_COMMANDS.get(name, "torch"), f"the command calls {name}")
    signs: dict[str, tuple[str, str]] = {}
    weak: dict[str, tuple[str, str]] = {}
    for path, used in _uses(script(argv), read):
        for known, into in ((_STRONG, signs), (_WEAK, weak)):
            if framework := _match(used, known):
                into.setdefault(known[framework], (path, framework))
    found = signs or weak
    if not found:
        return None
    why = " and ".join(f"{path} imports {module}" for path, module in found.values())
    return Guess(next(iter(found)) if len(found) == 1 else None, why)


def _match(used: str, known: dict[str, str]) -> str | None:
    """The longest name in `known` that is `used` or one of its parents."""
    parts = used.split(".")
    for size in range(len(parts), 0, -1):
        if (name := ".".join(parts[:size])) in known:
            return name
    return None


def _uses(paths: Sequence[str], read: Read) -> Iterator[tuple[str, str]]:
    """Every dotted name that the script and its local imports use, with the file that uses it."""
    waiting = [tuple(paths)]
    seen: set[str] = set()
    while waiting and len(seen) < MOST_FILES:
        path, text = _first(waiting.pop(0), read)
        if text is None or path in seen:
            continue
        seen.add(path)
        for name in _names(text):
            yield path, name
            base = name.replace(".", "/")
            parent = base.rpartition("/")[0]
            near = [base, *([parent] if parent else [])]
            folder = path.rpartition("/")[0]
            places = [f"{folder}/{one}" if folder else one for one in near] + near
            waiting.append(tuple(f"{place}{end}" for place in places for end in (".py", "/__init__.py")))


def _first(paths: Sequence[str], read: Read) -> tuple[str, str | None]:
    for path in paths:
        text = read(path)
        if text is not None:
            return path, text[:LONGEST]
    return "", None


def _names(text: str) -> list[str]:
    """Imported names, and attributes of imported modules: `torch.distributed` where only `torch` is imported."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Not Python, or for another version: no names.
        return []
    found: dict[str, None] = {}
    called: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.name] = None
                called[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            for alias in node.names:
                name = f"{base}.{alias.name}" if base else alias.name
                found[name] = None
                called[alias.asname or alias.name] = name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in called:
            found[f"{called[node.value.id]}.{node.attr}"] = None
    return list(found)
