"""Which files of a working directory are not shipped.

`.gitignore` files count as git reads them: nested, with negation, those of directories above up to the top of
the repository included. `.stokerignore` files have the same form and the last word, so `!data/small.csv` there
ships what git ignores. Reading the patterns needs pathspec, which takes longer to import than a scan takes; so
rules carry a fingerprint, decisions are cached by it, and the patterns are only read for names never seen.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

GIT, STOKER = ".gitignore", ".stokerignore"
NAMES = (GIT, STOKER)
ALWAYS = frozenset({".git", ".venv", "__pycache__", "node_modules"})
"""Never shipped: made again by whoever needs them, or of no use to a run."""
_MAX_BYTES = 1 << 20


class Layer:
    """The patterns of one ignore file, for paths beneath its directory."""

    def __init__(self, content: bytes, *, strip: str = "", add: str = "") -> None:
        self._content = content
        self._strip = len(strip)
        self._add = add
        self._spec: GitIgnoreSpec | None = None

    def decide(self, path: str) -> bool | None:
        """True: ignored; False: negated; None: not mentioned. Directories end in a slash."""
        if self._spec is None:
            self._spec = _compile(self._content)
        return self._spec.check_file(self._add + path[self._strip :]).include


class Rules:
    """What is ignored in one directory. Immutable; a directory with ignore files of its own extends it."""

    def __init__(
        self, git: tuple[Layer, ...] = (), stoker: tuple[Layer, ...] = (), fingerprint: str = ""
    ) -> None:
        self._git = git
        self._stoker = stoker
        self.fingerprint = fingerprint
        """Equal fingerprints decide every path alike; empty: nothing is ignored."""

    def extended(self, directory: str, files: dict[str, bytes], *, add: str = "") -> Rules:
        """With the ignore files (name -> content) of `directory`, a path relative to the top or ''."""
        strip = f"{directory}/" if directory else ""
        git, stoker, seed = self._git, self._stoker, self.fingerprint
        for name, content in sorted(files.items()):
            layer = Layer(content, strip=strip, add=add)
            if name == STOKER:
                stoker = (*stoker, layer)
            else:
                git = (*git, layer)
            parts = [
                seed.encode(),
                directory.encode(errors="surrogateescape"),
                add.encode(errors="surrogateescape"),
            ]
            seed = hashlib.sha256(b"\0".join([*parts, name.encode(), content])).hexdigest()[:24]
        return Rules(git, stoker, seed)

    def ignores(self, path: str, is_directory: bool) -> bool:
        """For a path whose parents are not ignored."""
        name = f"{path}/" if is_directory else path
        decision = False
        for layer in (*self._git, *self._stoker):
            found = layer.decide(name)
            if found is not None:
                decision = found
        return decision


def rules_above(workdir: Path) -> Rules:
    """What the repository around `workdir` says about it; nothing when it is no part of one."""
    chain = [workdir, *workdir.parents]
    top = next((n for n, directory in enumerate(chain) if (directory / ".git").exists()), None)
    if top is None:
        return Rules()
    rules = Rules()
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
    """The content of an ignore file without comments and empty lines; empty when it says nothing."""
    try:
        with path.open("rb") as handle:
            lines = handle.read(_MAX_BYTES).splitlines()
    except OSError:
        # Absent, a directory, or unreadable: git passes over such a file too.
        return b""
    return b"\n".join(line for line in lines if line.strip() and not line.startswith(b"#"))


def _compile(content: bytes) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec  # lazy: costs more than the rest of a scan

    lines = content.decode("utf-8", "surrogateescape").splitlines()
    try:
        return GitIgnoreSpec.from_lines(lines)
    except ValueError:
        # One line is not a pattern. git passes over it; so do we.
        return GitIgnoreSpec.from_lines([line for line in lines if _is_pattern(GitIgnoreSpec, line)])


def _is_pattern(kind: type[GitIgnoreSpec], line: str) -> bool:
    try:
        kind.from_lines([line])
    except ValueError:
        return False
    return True
