"""A tree: a directory as a value. Code, checkpoints and outputs are trees of blobs.

A tree is a sorted list of files (path, SHA-256, size, executable or not) and links. Its name is the SHA-256 of its
canonical JSON, so two equal directories are one tree wherever they come from. Trees arrive from foreign machines and
from training code. `validate` holds every rule about names, and every tree is validated before it is written to disk.

Links are kept only if they stay inside. Checking the text of the target is enough, because of two rules: `..` may
stand only at the front of a target, at most as often as the link is deep, and nothing lies below a link. So going up
always starts from a real directory, and going down can only meet links that obey the same rules.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stoker.errors import SpecError, TooLarge

MAX_COMPONENT = 255
"""Bytes of one name: the limit of Linux file systems."""
MAX_PATH = 4096
"""Bytes of a whole path."""
CODE_FILES = 200_000
CODE_BYTES = 5 << 30
"""Limits for a working directory that is shipped with a run. Larger data belongs into inputs."""

FILE_MODES = (0o644, 0o755)

_PLAIN = re.compile(r"(?:(?!\.{1,2}(?:/|\Z))[!-.0-~]{1,255}(?:/(?!\Z)|\Z))+")
"""Most paths: ASCII without spaces."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class TreeFile:
    """A file, or a link when `link` is set."""

    path: str
    sha256: str = ""
    size: int = 0
    mode: int = 0o644
    link: str | None = None

    def to_json(self) -> dict[str, Any]:
        if self.link is not None:
            return {"path": self.path, "link": self.link}
        return {"path": self.path, "sha256": self.sha256, "size": self.size, "mode": self.mode}


@dataclass(frozen=True)
class Tree:
    """Files sorted by path. The constructor checks nothing; `validate` does."""

    files: tuple[TreeFile, ...] = ()

    @classmethod
    def of(cls, files: Iterable[TreeFile]) -> Tree:
        return cls(tuple(sorted(files, key=lambda file: file.path)))

    @classmethod
    def from_json(cls, raw: Any) -> Tree:
        """A tree from received JSON. Checks shapes and types; `validate` checks the rules."""
        if not isinstance(raw, dict) or set(raw) != {"files"} or not isinstance(raw["files"], list):
            raise SpecError("a tree manifest must be an object with one key, files, a list")
        return cls(tuple(_file(entry) for entry in raw["files"]))

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def blobs(self) -> dict[str, int]:
        """The blobs of this tree: digest -> size."""
        return {file.sha256: file.size for file in self.files if file.link is None}

    def canonical(self) -> bytes:
        """The bytes that are hashed and stored."""
        value = {"files": [file.to_json() for file in self.files]}
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    def digest(self) -> str:
        return hashlib.sha256(self.canonical()).hexdigest()

    def renamed(self, rename: Callable[[str], str]) -> Tree:
        """With other names for files and directories. Raises SpecError for an invalid name and for two equal paths."""
        files = [replace(file, path="/".join(map(rename, file.path.split("/")))) for file in self.files]
        return Tree.of(files).validate(max_files=None, max_bytes=None)

    def validate(self, *, max_files: int | None = CODE_FILES, max_bytes: int | None = CODE_BYTES) -> Tree:
        """Raises SpecError or TooLarge unless every rule holds; returns itself."""
        if max_files is not None and len(self.files) > max_files:
            raise TooLarge(f"the tree has {len(self.files)} files, over the cap of {max_files}")
        previous = ""
        leaves: set[str] = set()
        sizes: dict[str, int] = {}
        for file in self.files:
            check_path(file.path)
            if file.path == previous:
                raise SpecError(f"the tree names {file.path!r} twice")
            if file.path < previous:
                raise SpecError(f"the tree is not sorted: {file.path!r} comes after {previous!r}")
            previous = file.path
            if file.link is not None:
                check_link(file.path, file.link)
            else:
                _check_file(file, sizes)
            leaves.add(file.path)
        _check_parents(leaves)
        total = self.size
        if max_bytes is not None and total > max_bytes:
            raise TooLarge(f"the tree holds {total} bytes, over the cap of {max_bytes}")
        return self


def check_digest(value: object) -> str:
    """Returns the digest, or raises SpecError. Called before any digest becomes part of a path."""
    if not isinstance(value, str) or _DIGEST.fullmatch(value) is None:
        raise SpecError(
            f"not a SHA-256 digest: {str(value)[:80]!r}", hint="A digest is 64 lower-case hex digits."
        )
    return value


def check_path(path: str) -> None:
    """A relative path of plain names. Case is kept and nothing is normalised, so no name can bypass a check."""
    if len(path) <= MAX_PATH and _PLAIN.fullmatch(path):
        return
    try:
        raw = path.encode()
    except UnicodeEncodeError as exc:
        raise SpecError(f"the name {path!a} is not UTF-8", hint="Rename the file.") from exc
    if len(raw) > MAX_PATH:
        raise SpecError(f"the path {path[:60]!r}... has {len(raw)} bytes, over the limit of {MAX_PATH}")
    if "\0" in path:
        raise SpecError(f"the path {path!r} contains a NUL character")
    for part in path.split("/"):
        if part in ("", ".", ".."):
            raise SpecError(f"the path {path!r} is not a plain relative path")
        if len(part) > 63 and len(part.encode()) > MAX_COMPONENT:
            raise SpecError(f"the name {part[:60]!r}... has over {MAX_COMPONENT} bytes")


def check_link(path: str, target: str) -> None:
    """Checks that a link at `path` to `target` cannot lead outside, whatever other links there are."""
    parts = target.split("/")
    up = 0
    while up < len(parts) and parts[up] == "..":
        up += 1
    inside = up <= path.count("/") and ".." not in parts[up:] and not target.startswith("/")
    if not target or "\0" in target or not inside:
        raise SpecError(
            f"the link {path!r} points to {target!r}, which is not inside the tree",
            hint="Links must be relative and stay inside; `..` may stand only at the front.",
        )
    try:
        long = len(target.encode()) > MAX_PATH
    except UnicodeEncodeError as exc:
        raise SpecError(f"the target {target!a} of the link {path!r} is not UTF-8") from exc
    if long:
        raise SpecError(f"the target of the link {path!r} is over {MAX_PATH} bytes")


def _check_file(file: TreeFile, sizes: dict[str, int]) -> None:
    check_digest(file.sha256)
    if file.mode not in FILE_MODES:
        raise SpecError(f"the mode of {file.path!r} is {file.mode:#o}", hint="Modes: 0o644, 0o755.")
    if file.size < 0:
        raise SpecError(f"the size of {file.path!r} is {file.size}")
    if sizes.setdefault(file.sha256, file.size) != file.size:
        raise SpecError(f"the tree gives two sizes for the content of {file.path!r}")


def _check_parents(leaves: set[str]) -> None:
    """Nothing may lie below a file or a link."""
    seen: set[str] = set()
    for path in leaves:
        parent = path.rpartition("/")[0]
        while parent and parent not in seen:
            if parent in leaves:
                raise SpecError(f"the tree has {parent!r} both as a file and as a directory")
            seen.add(parent)
            parent = parent.rpartition("/")[0]


def _file(entry: Any) -> TreeFile:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("path"), str):
        raise SpecError("every entry of a tree must be an object with a path")
    path: str = entry["path"]
    if "link" in entry:
        if set(entry) != {"path", "link"} or not isinstance(entry["link"], str):
            raise SpecError(f"the link {path!r} must have exactly path and link")
        return TreeFile(path, link=entry["link"])
    if set(entry) != {"path", "sha256", "size", "mode"}:
        raise SpecError(f"the file {path!r} must have exactly path, sha256, size and mode")
    sha256, size, mode = entry["sha256"], entry["size"], entry["mode"]
    if not isinstance(sha256, str) or type(size) is not int or type(mode) is not int:
        raise SpecError(f"the file {path!r} has a sha256, size or mode of the wrong type")
    return TreeFile(path, sha256, size, mode)
