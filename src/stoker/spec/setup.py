"""The files that a `setup` depends on. Their content is the key under which its result is cached.

With too few files a change goes unnoticed. Running again is only slow; not running again is wrong. So without
`inputs` a plain installer depends on the usual files and on everything it names (`pip install -e .` on the whole
tree). Anything else (`make`, a script) depends on the whole tree.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator

from stoker.spec.globs import LINE, Patterns
from stoker.spec.job import Setup

USUAL = (
    "requirements*.txt",
    "constraints*.txt",
    "pyproject.toml",
    "setup.py",
    "setup.cfg",
    "environment.yml",
    "environment.yaml",
    "Pipfile",
    "Pipfile.lock",
    "poetry.lock",
    "uv.lock",
    "pdm.lock",
    "pixi.lock",
    "pixi.toml",
)

_INSTALL = re.compile(
    r"(python3?\s+-m\s+)?(uv\s+)?(pip3?|conda|mamba|uv|poetry|pdm|pixi)\s+(install|sync|env|add)\b[^;&|`$<>\n]*"
)


_LONGEST = LINE // 8 - 1
"""Characters of a word that may be a path: in a pattern each may take eight bytes."""


def setup_inputs(setup: Setup, paths: Iterable[str]) -> list[str]:
    """Those of `paths` (relative to the working directory, `/`-separated) that the setup depends on, sorted."""
    patterns = setup.inputs or (*USUAL, *_named(setup.run))
    if "." in patterns or not (setup.inputs or _only_installs(setup.run)):
        return sorted(paths)
    # A pattern with a leading slash is matched from the top, and a directory includes everything below it.
    wanted = Patterns(f"/{posixpath.normpath(p)}".encode("utf-8", "surrogateescape") for p in patterns)
    return sorted(_beneath(wanted, paths))


def _only_installs(command: str) -> bool:
    """Whether the command consists only of package installers, one after another."""
    parts = [part.strip() for part in re.split(r"&&|;|\n", command) if part.strip()]
    return bool(parts) and all(_INSTALL.fullmatch(part) for part in parts)


def _beneath(wanted: Patterns, paths: Iterable[str]) -> Iterator[str]:
    directories: dict[bytes, bool] = {b"": False}
    for path in paths:
        raw = path.encode("utf-8", "surrogateescape")
        above = raw.rpartition(b"/")[0]
        unknown = []
        while above not in directories:
            unknown.append(above)
            above = above.rpartition(b"/")[0]
        for directory in reversed(unknown):
            inside = directories[directory.rpartition(b"/")[0]]
            directories[directory] = inside or bool(wanted.decide(directory, directory=True))
        if directories[raw.rpartition(b"/")[0]] or wanted.decide(raw, directory=False):
            yield path


def _named(command: str) -> list[str]:
    """Words of the command that may be paths below the working directory, as literal patterns."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:  # an open quote: the shell will complain; splitting at spaces suffices
        words = command.split()
    found = []
    for word in words:
        bare = [part.strip(";&|()<>") for part in (word, word.partition("=")[2])]
        # `.[dev]` is the directory `.`, and `w[1].txt` may be a file: both readings count.
        for part in (*bare, *(part.partition("[")[0] for part in bare)):
            clean = posixpath.normpath(part) if part else ""
            if (
                clean
                and len(clean) <= _LONGEST
                and not clean.startswith(("/", "..", "-", "~"))
                and "\n" not in clean
            ):
                found.append(clean if clean == "." else re.sub(r"([*?\[\]!#\\ ])", r"\\\1", clean))
    return found
