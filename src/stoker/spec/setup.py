"""Which files a `setup` depends on. Their content is the key under which its result is cached.

Too few files and a changed one goes unnoticed, so without `inputs` everything the command names counts: files
by name, directories with all they hold (`pip install -e .` depends on the whole tree).
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


def setup_inputs(setup: Setup, paths: Iterable[str]) -> list[str]:
    """Those of `paths` (relative to the working directory, `/`-separated) the setup depends on, sorted."""
    patterns = setup.inputs or (*USUAL, *_named(setup.run))
    if "." in patterns:
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
