"""Reading a command without running it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath


def words(argv: Sequence[str]) -> list[str]:
    """A command word by word, also one that is written for the shell."""
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


def program(argv: Sequence[str]) -> str:
    """The name of what it calls first, past settings of variables."""
    for word in words(argv):
        if word != "exec" and "=" not in word.split("/")[0]:
            return PurePosixPath(word).name
    return ""


def calls_torchrun(argv: Sequence[str]) -> bool:
    """`--launcher torchrun` is an option of something else."""
    found = words(argv)
    for before, word in zip(["", *found], found, strict=False):
        if PurePosixPath(word).name == "torchrun" and not before.startswith("-"):
            return True
        if before == "-m" and word in ("torch.distributed.run", "torch.distributed.launch"):
            return True
    return False


def script(argv: Sequence[str]) -> list[str]:
    """Where the Python code that it runs may be, relative to the working directory; empty: nobody can tell."""
    found = words(argv)
    for at, word in enumerate(found):
        if word == "-m" and at and is_python(found[at - 1]) and at + 1 < len(found):
            path = found[at + 1].replace(".", "/")
            return [f"{path}.py", f"{path}/__main__.py"]
        if word.endswith(".py"):
            return [word]
    return []
