"""Whether a program sets environment variables that libraries read when they are imported. Its code is read, not run.

Where that cannot be determined, the program counts as one that does: then only time is lost.
"""

from __future__ import annotations

import os
import re
from typing import List

SCRIPTS, BYTES = 300, 4 << 20
"""Limits of the code that is read. A program with more counts as one that sets variables."""

_IMPORTS = re.compile(
    r"^[ \t]*(?:import[ \t]+(?P<plain>[^\n#;]+)"
    r"|from[ \t]*(?P<dots>\.*)(?P<module>(?:\w[\w.]*)?)(?<=[\w.])[ \t]+import[ \t]*(?P<names>[^\n#;]*))",
    re.MULTILINE,
)

_SETS = re.compile(
    r"environ(?:b)?\s*\[(?P<key>[^\]\[\n]*)\]\s*=(?!=)"
    r"|environ(?:b)?\s*\.\s*(?:setdefault|__setitem__|pop)\s*\((?P<name>[^,)\n]*)"
    r"|(?P<any>environ(?:b)?\s*\[[^\]\[\n]*\[|environ(?:b)?\s*\.\s*(?:update|clear)\b|environ\s*\|=|\b(?:un)?(?:put|set)env\s*\(|load_dotenv)"
)
_HARMLESS = re.compile(r"""\s*["'](?:MASTER_|RANK|LOCAL_|WORLD_|TOKENIZERS_|WANDB|HF_|STOKER_)\w*["']\s*""")


def sets_environment(program: List[str]) -> bool:
    """Whether the program, or a module that it imports from its own folder, may set variables that libraries read when they
    are imported. Then no library may be imported in advance. True also where its code cannot be found."""
    if program[0] == "-m":
        place = os.getcwd()
        waiting = [found for name in (program[1], program[1] + ".__main__") for found in _files(place, name)]
    else:
        place = os.path.dirname(os.path.realpath(program[0]))
        waiting = [os.path.realpath(program[0])]
    seen = set(waiting)
    size = 0
    while waiting:
        path = waiting.pop()
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read(BYTES)
        except OSError:
            return True
        size += len(text)
        if len(seen) > SCRIPTS or size >= BYTES or _sets(text):
            return True
        new = [found for found in _imports(place, path, text) if found not in seen]
        seen.update(new)
        waiting.extend(new)
    return not seen


def _sets(text: str) -> bool:
    for found in _SETS.finditer(text):
        key = found.group("key") or found.group("name")
        if found.group("any") or not _HARMLESS.fullmatch(key or ""):
            return True
    return False


def _imports(place: str, path: str, text: str) -> List[str]:
    """Files of the program's own folder that this one imports."""
    found: List[str] = []
    done, last = 0, text.rfind(")")
    for match in _IMPORTS.finditer(text):
        if match.start() < done:
            continue
        dots, module, names = match.group("dots") or "", match.group("module") or "", match.group("names")
        root = place
        if dots:
            root = path
            for _ in dots:
                root = os.path.dirname(root)
        if names is not None and names.startswith("(") and match.start("names") < last:
            done = text.index(")", match.start("names"))
            names = text[match.start("names") : done]
        if names is None:
            modules = [part.split()[0] for part in match.group("plain").split(",") if part.split()]
        else:
            parts = [part.split()[0] for part in re.split(r"[(),\s]+", names) if part.split()]
            modules = [module, *(f"{module}.{part}".lstrip(".") for part in parts)]
        for name in modules:
            found.extend(_files(root, name))
    return found


def _files(root: str, module: str) -> List[str]:
    """The files that are loaded for `a.b`, if they are in `root`."""
    parts = [part for part in module.split(".") if part]
    found = []
    for count in range(1, len(parts) + 1):
        base = os.path.join(root, *parts[:count])
        found += [path for path in (base + ".py", os.path.join(base, "__init__.py")) if os.path.isfile(path)]
    return [os.path.realpath(path) for path in found]
