"""Analyses a command without running it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

_FOR_THE_SHELL = re.compile(r"[$`;&|<>()*?\[\]{}~#!\n\\]")
"""Without any of these the shell reads a command as plain words."""
_OPTION = re.compile(r"-[bBdEIOPqRsSuv]+|-[WX].*")
"""Options of Python that do not decide what it runs."""


def words(argv: Sequence[str]) -> list[str]:
    """The words of a command, also of one written for the shell."""
    if len(argv) == 3 and PurePosixPath(argv[0]).name in ("sh", "bash") and argv[1] in ("-c", "-ec", "-lc"):
        try:
            return shlex.split(argv[2], comments=True)
        except ValueError:
            return argv[2].split()
    return list(argv)


def is_python(word: str) -> bool:
    """`python`, `python3.12`, `/opt/venv/bin/python`"""
    name = PurePosixPath(word).name
    return name == "python" or (name.startswith("python") and name[6:].replace(".", "").isdigit())


def python_call(argv: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """`python -u train.py --lr 1` in two: Python with its options, and the program (`train.py`, or `-m` and a module)
    with its arguments. None: another program, or the shell has to expand it first."""
    found = words(argv)
    if found != list(argv) and _FOR_THE_SHELL.search(argv[2]):
        return None
    if found[:1] == ["exec"]:
        found = found[1:]
    if not found or not is_python(found[0]):
        return None
    at = 1
    while at < len(found) and _OPTION.fullmatch(found[at]):
        at += 2 if found[at] in ("-W", "-X") else 1
    rest = found[at:]
    known = (rest[:1] == ["-m"] and len(rest) > 1) or (bool(rest) and rest[0].endswith(".py"))
    return (found[:at], rest) if known else None


def program(argv: Sequence[str]) -> str:
    """The name of the program it calls first, after assignments of variables."""
    for word in words(argv):
        if word != "exec" and "=" not in word.split("/")[0]:
            return PurePosixPath(word).name
    return ""


def calls_torchrun(argv: Sequence[str]) -> bool:
    """Whether it calls torchrun. `--launcher torchrun` is an option of another program."""
    found = words(argv)
    for before, word in zip(["", *found], found, strict=False):
        if PurePosixPath(word).name == "torchrun" and not before.startswith("-"):
            return True
        if before == "-m" and word in ("torch.distributed.run", "torch.distributed.launch"):
            return True
    return False


def script(argv: Sequence[str]) -> list[str]:
    """Possible paths of the Python code it runs, relative to the working directory; empty: not known."""
    found = words(argv)
    for at, word in enumerate(found):
        if word == "-m" and at and is_python(found[at - 1]) and at + 1 < len(found):
            path = found[at + 1].replace(".", "/")
            return [f"{path}.py", f"{path}/__main__.py"]
        if word.endswith(".py"):
            return [word]
    return []
