"""Which files of a run's working folder are kept. Pure.

The last of these that matches a path decides: what is junk in every folder, the patterns of the folder's `.stokerignore`,
and the job's `keep_files`. A budget then limits the bytes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from stoker.errors import TooLarge
from stoker.spec import names, quantities
from stoker.spec.globs import Patterns
from stoker.spec.quantities import Bad

NONE = "none"
JUNK = (
    "__pycache__/",
    ".git/",
    ".hg/",
    ".svn/",
    ".venv/",
    "node_modules/",
    ".cache/",
    ".ipynb_checkpoints/",
    ".pytest_cache/",
    ".mypy_cache/",
    ".ruff_cache/",
    "*.pyc",
    "*.swp",
    "*~",
    ".nfs*",
    ".DS_Store",
    "core.[0-9]*",
    "*.tmp",
    "*.temp",
    "*.part",
    "*.partial",
    "*.incomplete",
    "*.crdownload",
    "*.aria2",
    "*.torn",
    "**/wandb/latest-run",
    "**/wandb/debug*.log",
)
"""Caches, editors' files, and what was still being written. Patterns as in `.stokerignore`."""
EARLY = 0.25
"""A file that was last written in this first part of an attempt may be a download: it can be downloaded again."""


class FileFacts(NamedTuple):
    path: str
    size: int
    mtime: float


class Chosen(NamedTuple):
    kept: list[FileFacts]
    left: list[FileFacts]
    """Largest first."""


def keep_files(value: Any) -> tuple[str, ...]:
    """The value of the job's key: `none`, a size, a pattern, or a list of patterns with at most one size."""
    entries = list(value) if isinstance(value, (list, tuple)) else [value]
    found = tuple(_entry(entry) for entry in entries)
    if NONE in found and len(found) > 1:
        raise Bad("`none` stands for itself", hint="Remove it, or the other entries.")
    sizes = [entry for entry in found if size_of(entry) is not None]
    if len(sizes) > 1:
        raise Bad(f"two sizes: {sizes[0]} and {sizes[1]}", hint="Write one.")
    return tuple(dict.fromkeys(found))


def _entry(value: Any) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, dict):
        raise Bad(
            f"{quantities.show(value)} is not a pattern, a size or `none`",
            hint='Write it as in `["runs/", "*.pt", 20Gi]`.',
        )
    text = names.text(value).strip()
    names.glob(text.removeprefix("!"))
    try:
        Patterns([os.fsencode(text)])
    except TooLarge as exc:
        raise Bad(exc.message, hint="Name directories instead.") from exc
    return text


def size_of(entry: str) -> int | None:
    """Bytes, where an entry is a size: digits with a unit."""
    if not entry[:1].isdigit() or not entry[-1:].isalpha():
        return None
    try:
        return quantities.size(entry)
    except Bad:
        return None


class KeepRules:
    """The rules of one run."""

    def __init__(self, entries: Sequence[str], ignore: Iterable[bytes] = ()) -> None:
        """`entries`: the job's `keep_files`. `ignore`: the lines of the folder's `.stokerignore`."""
        sizes = [size for entry in entries if (size := size_of(entry)) is not None]
        patterns = [entry for entry in entries if entry != NONE and size_of(entry) is None]
        self.none = NONE in entries
        self.budget = sizes[0] if sizes else None
        self._only = any(not entry.startswith("!") for entry in patterns)
        """Only what a pattern names is kept."""
        self._junk = Patterns(map(os.fsencode, JUNK))
        self._ignored = Patterns(ignore)
        self._own = Patterns(os.fsencode(_reversed(entry)) for entry in patterns)
        self._under = functools.lru_cache(maxsize=4096)(self._decide)

    def keeps(self, path: str) -> bool:
        """Whether a file is kept."""
        return not self.none and self._decide(path, False)[0]

    def enters(self, path: str) -> bool:
        """Whether files in a directory may be kept."""
        if self.none:
            return False
        kept, refused = self._under(path, True)
        return kept or (self._only and not refused)

    def ignored(self, path: str, *, directory: bool) -> bool:
        """Whether `.stokerignore` is the reason that a path is not kept."""
        decided = self._ignored.decide(os.fsencode(path), directory=directory)
        return bool(decided) and not self._junk.decide(os.fsencode(path), directory=directory)

    def _decide(self, path: str, directory: bool) -> tuple[bool, bool]:
        """Whether a path is kept, and whether a pattern says that it is not."""
        parent = path.rpartition("/")[0]
        kept, refused = self._under(parent, True) if parent else (not self._only, False)
        name = os.fsencode(path)
        for patterns in (self._junk, self._ignored, self._own):
            found = patterns.decide(name, directory=directory)
            if found is not None:
                kept, refused = not found, found
        return kept, refused


def _reversed(entry: str) -> str:
    """As a line of an ignore file: what is to be kept is not ignored."""
    return entry[1:] if entry.startswith("!") else f"!{entry}"


def within_budget(files: Iterable[FileFacts], budget: int, began: float, ended: float) -> Chosen:
    """What fits into `budget` bytes. Probable downloads are left first, then the largest files."""
    kept = list(files)
    total = sum(file.size for file in kept)
    if total <= budget:
        return Chosen(kept, [])
    early = began + EARLY * max(0.0, ended - began)
    left: list[FileFacts] = []
    for file in sorted(kept, key=lambda file: (file.mtime > early, -file.size, file.path)):
        if total <= budget:
            break
        left.append(file)
        total -= file.size
    gone = set(left)
    return Chosen(
        [file for file in kept if file not in gone],
        sorted(left, key=lambda file: (-file.size, file.path)),
    )
