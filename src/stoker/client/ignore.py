"""Which files of a working directory are not shipped.

`.gitignore` files count as in git: nested, with negation, and with those of the directories above up to the top of
the repository. `.stokerignore` files have the same form and the last word: `!data/small.csv` there ships a file
that git ignores. Compiling the patterns takes longer than a scan. So rules carry a fingerprint, decisions are cached
by it, and patterns are compiled only for names never seen before.
These files may come with foreign code: their size is bounded before they are compiled.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import TooLarge

if TYPE_CHECKING:
    from stoker.spec.globs import Patterns

GIT, STOKER = ".gitignore", ".stokerignore"
NAMES = (GIT, STOKER)
ALWAYS = frozenset({".git", ".venv", "__pycache__", "node_modules"})
"""Never shipped: made again on the other side, or of no use to a run."""
MAX_BYTES = 1 << 20
"""Bytes of all ignore files that count for one directory. More is an error: files that must stay here would be shipped
if patterns were left out."""
_VERSION = b"2"
"""Part of every fingerprint. Raised when the same patterns get another meaning."""


class IgnoreLayer:
    """The patterns of one ignore file, for paths beneath its directory."""

    def __init__(self, content: bytes, *, name: str, strip: str = "", add: str = "") -> None:
        self._content = content
        self.name = name
        self._strip = len(strip)
        self._add = add
        self._patterns: Patterns | None = None
        self._above: bool | None = None
        """What the patterns decide for the directories in `add`: below an ignored directory everything is ignored."""

    def decide(self, path: str, is_directory: bool) -> bool | None:
        """True: ignored; False: negated; None: not mentioned."""
        if self._patterns is None:
            self._patterns = self._compiled()
            self._above = self._of_parents(self._patterns)
        if self._above:
            return True
        found = self._patterns.decide(os.fsencode(self._add + path[self._strip :]), directory=is_directory)
        return self._above if found is None else found

    def _compiled(self) -> Patterns:
        from stoker.spec.globs import Patterns  # lazy: not needed when every name is known

        try:
            return Patterns(self._content.split(b"\n"))
        except TooLarge as exc:
            raise TooLarge(f"{self.name}: {exc.message}", hint=exc.hint) from exc

    def _of_parents(self, patterns: Patterns) -> bool | None:
        decision = None
        parts = self._add.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            found = patterns.decide(os.fsencode("/".join(parts[:depth])), directory=True)
            if found:
                return True
            decision = decision if found is None else found
        return decision


class IgnoreRules:
    """The ignore rules of one directory. Immutable; a directory with its own ignore files extends them."""

    def __init__(
        self,
        git: tuple[IgnoreLayer, ...] = (),
        stoker: tuple[IgnoreLayer, ...] = (),
        fingerprint: str = "",
        size: int = 0,
    ) -> None:
        self._git = git
        self._stoker = stoker
        self.fingerprint = fingerprint
        """Rules with equal fingerprints decide every path alike. Empty: nothing is ignored."""
        self._size = size

    def extended(self, directory: str, files: dict[str, bytes], *, add: str = "") -> IgnoreRules:
        """These rules and the ignore files (name -> content) of `directory`, a path relative to the top or ''."""
        strip = f"{directory}/" if directory else ""
        git, stoker, seed = self._git, self._stoker, self.fingerprint
        size = self._size + sum(len(content) for content in files.values())
        if size > MAX_BYTES:
            raise _too_large(f"the ignore files for {directory or '.'!r} have")
        for name, content in sorted(files.items()):
            layer = IgnoreLayer(content, name=strip + name, strip=strip, add=add)
            if name == STOKER:
                stoker = (*stoker, layer)
            else:
                git = (*git, layer)
            parts = [
                _VERSION,
                seed.encode(),
                directory.encode(errors="surrogateescape"),
                add.encode(errors="surrogateescape"),
            ]
            seed = hashlib.sha256(b"\0".join([*parts, name.encode(), content])).hexdigest()[:24]
        return IgnoreRules(git, stoker, seed, size)

    def ignores(self, path: str, is_directory: bool) -> bool:
        """Whether a path is ignored whose parents are not."""
        return self.ignored_by(path, is_directory) is not None

    def ignored_by(self, path: str, is_directory: bool) -> str | None:
        """The ignore file by which a path is ignored; None: it is not."""
        decision = None
        for layer in (*self._git, *self._stoker):
            found = layer.decide(path, is_directory)
            if found is not None:
                decision = layer.name if found else None
        return decision


def rules_above(workdir: Path) -> IgnoreRules:
    """The rules that the repository around `workdir` has for it; none outside a repository."""
    chain = [workdir, *workdir.parents]
    top = next((n for n, directory in enumerate(chain) if (directory / ".git").exists()), None)
    if top is None:
        return IgnoreRules()
    rules = IgnoreRules()
    if excluded := read_rules(chain[top] / ".git" / "info" / "exclude"):
        rules = rules.extended("", {"exclude": excluded}, add=_between(chain[top], workdir))
    for directory in reversed(chain[1 : top + 1]):
        files = {name: content for name in NAMES if (content := read_rules(directory / name))}
        rules = rules.extended("", files, add=_between(directory, workdir))
    return rules


def _between(directory: Path, workdir: Path) -> str:
    relative = workdir.relative_to(directory).as_posix()
    return "" if relative == "." else f"{relative}/"


def read_rules(path: Path) -> bytes:
    """The content of an ignore file without comments and empty lines. Raises TooLarge."""
    try:
        # Opening a pipe of that name would block without O_NONBLOCK.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        # Absent or unreadable: git ignores such a file too.
        return b""
    with os.fdopen(fd, "rb") as handle:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return b""
        content = handle.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise _too_large(f"{str(path)!r} has")
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return b"\n".join(line for line in lines if line.strip() and not line.startswith(b"#"))


def _too_large(which: str) -> TooLarge:
    return TooLarge(
        f"{which} more than {MAX_BYTES >> 10} KiB of patterns",
        hint="Name directories instead of their files.",
    )
