"""Which files a `setup` depends on. Their content is the key under which its result is cached.

Too few files and a changed one goes unnoticed: running again is slow, not running again is wrong. So without
`inputs` a plain installer depends on the usual files and on everything it names (`pip install -e .` on the whole
tree), and anything else (`make`, a script) on the whole tree.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterable

import pathspec

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

_INSTALL = r"(python3?\s+-m\s+)?(uv\s+)?(pip3?|conda|mamba|uv|poetry|pdm|pixi)\s+(install|sync|env|add)\b[^;&|`$<>\n]*"
_INSTALLS = re.compile(rf"\s*{_INSTALL}((&&|;|\n)\s*{_INSTALL})*[;\s]*\Z")
"""Nothing but package installers, one after another."""


def setup_inputs(setup: Setup, paths: Iterable[str]) -> list[str]:
    """Those of `paths` (relative to the working directory, `/`-separated) the setup depends on, sorted."""
    patterns = setup.inputs or (*USUAL, *_named(setup.run))
    if "." in patterns or not (setup.inputs or _INSTALLS.match(setup.run)):
        return sorted(paths)
    # A pattern with a slash in front is matched from the top, and a directory with everything beneath it.
    spec = pathspec.PathSpec.from_lines("gitignore", [f"/{posixpath.normpath(p)}" for p in patterns])
    return sorted(path for path in paths if spec.match_file(path))


def _named(command: str) -> list[str]:
    """Words of the command that may be paths beneath the working directory, as literal patterns."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:  # an open quote: the shell will complain, words are words all the same
        words = command.split()
    found = []
    for word in words:
        bare = [part.strip(";&|()<>") for part in (word, word.partition("=")[2])]
        # `.[dev]` is the directory `.`, and `w[1].txt` may be a file: both readings count.
        for part in (*bare, *(part.partition("[")[0] for part in bare)):
            clean = posixpath.normpath(part) if part else ""
            if clean and not clean.startswith(("/", "..", "-", "~")) and "\n" not in clean:
                found.append(clean if clean == "." else re.sub(r"([*?\[\]!#\\ ])", r"\\\1", clean))
    return found
