"""The working directory as a tree, without reading files that have not changed.

The cache knows, per directory, what each name was last time: ignored, kept, or a file of this size, times and inode
with this hash. A file is hashed again when any of these differ. A file that was changed within two seconds before it
was hashed is not cached: its next change might leave its times the same.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stoker.client.ignore import ALWAYS, NAMES, IgnoreRules, read_rules, rules_above
from stoker.errors import Refused, SpecError, TooLarge
from stoker.spec.folder_extras import MAX_FOLDERS, MAX_LINKS, FolderExtras
from stoker.spec.tree import CODE_BYTES, CODE_FILES, Tree, TreeFile, check_link, check_path
from stoker.task.units import readable_size

WARN_BYTES = 500 << 20
RACY_NS = 2_000_000_000
_TRIES = 3
_FORMAT = b"stoker tree cache 1"
_TREE = "\0tree"
"""In the cache, instead of a directory: the digest of the whole tree, and its links."""

Cache = dict[str, tuple[str, dict[str, Any]]]
"""directory -> (fingerprint of its rules, name -> False: ignored | True: kept | [size, mtime, ctime, inode, sha256])"""


class Changed(Exception):
    """A file differs from what the scan saw."""


@dataclass(frozen=True)
class Scan:
    """What a scan saw. The tree is made when it is asked for: where nothing has changed its digest is known without it."""

    root: Path
    contents: Mapping[str, tuple[str, os.stat_result]]
    """Path -> sha256 and what the scan saw of the file."""
    links: Mapping[str, str]
    extras: FolderExtras
    """What the tree cannot have: links that lead out, and empty folders."""
    warnings: tuple[str, ...] = ()
    hashed: int = 0
    """Files that had to be read."""
    known: str | None = None
    """The digest of the tree, from the cache."""

    @cached_property
    def tree(self) -> Tree:
        files = [TreeFile(path, link=target) for path, target in self.links.items()]
        for path, (sha256, info) in self.contents.items():
            files.append(TreeFile(path, sha256, info.st_size, 0o755 if info.st_mode & 0o100 else 0o644))
        return Tree.of(files).validate()

    @cached_property
    def digest(self) -> str:
        """Of the tree."""
        return self.known or self.tree.digest()

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """sha256 -> a path that has it."""
        return {sha256: path for path, (sha256, _) in self.contents.items()}

    def open(self, sha256: str) -> int:
        """A descriptor of a file with these bytes, judged by size and times. Raises Changed."""
        path = self.sources[sha256]
        try:
            fd = os.open(self.root / path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as exc:
            raise Changed(path) from exc
        if not self.same(sha256, fd):
            os.close(fd)
            raise Changed(path)
        return fd

    def same(self, sha256: str, fd: int) -> bool:
        """Whether an open file is still what the scan saw."""
        return _identity(os.fstat(fd)) == _identity(self.contents[self.sources[sha256]][1])


_HOME = {"server.lock", "stoker.db", "token"}
"""Names that every Stoker home has."""


def scan(workdir: Path, cache: Path) -> Scan:
    """The files of `workdir` that are shipped. `cache` is the home's directory for caches; the home itself is never
    shipped. Raises Refused or TooLarge with the name of the file at fault."""
    root = Path(os.path.realpath(workdir))
    if not root.is_dir():
        raise Refused(f"the working directory {str(workdir)!r} is not a directory")
    scanner = _Scanner(root, _cache_path(root, cache), Path(os.path.realpath(cache.parent)))
    return scanner.scan()


class _Scanner:
    def __init__(self, root: Path, cache_path: Path, home: Path) -> None:
        self._root = root
        self._cache_path = cache_path
        self._home = str(home) if home.is_relative_to(root) and home != root else None
        self._old = _load(cache_path)
        self._new: Cache = {}
        self._found: dict[str, os.stat_result] = {}
        self._links: dict[str, str] = {}
        self._outside: dict[str, str] = {}
        """Links that lead out -> their absolute targets."""
        self._empty: list[str] = []
        """Directories of which nothing is shipped."""
        self._warnings: list[str] = []
        self._total = 0
        self._hashed = 0

    def scan(self) -> Scan:
        waiting: list[tuple[str, IgnoreRules]] = [("", rules_above(self._root))]
        while waiting:
            directory, rules = waiting.pop()
            waiting.extend(self._directory(directory, rules))
        self._check_size()
        contents: dict[str, tuple[str, os.stat_result]] = {}
        for path, seen in self._found.items():
            with contextlib.suppress(FileNotFoundError):  # deleted since the scan saw it
                contents[path] = self._hash(path, seen)
        extras = FolderExtras(self._outside, self._empty_folders())
        known = self._known_digest(contents)
        found = Scan(self._root, contents, self._links, extras, tuple(self._warnings), self._hashed, known)
        if self._new != self._old or (known is None and not self._hashed):
            _save(self._cache_path, {**self._new, _TREE: (found.digest, self._links)})
        return found

    def _known_digest(self, contents: Mapping[str, Any]) -> str | None:
        """The digest of the last scan's tree, if this one's is the same."""
        digest, links = self._old.pop(_TREE, ("", {}))
        same = not self._hashed and len(contents) == len(self._found) and self._new == self._old
        return digest if digest and same and links == self._links else None

    def _empty_folders(self) -> tuple[str, ...]:
        if len(self._empty) > MAX_FOLDERS:
            self._warnings.append(
                f"the working directory has {len(self._empty)} empty folders, more than {MAX_FOLDERS}: "
                "they are not there in the run"
            )
            return ()
        return tuple(sorted(filter(_encodable, self._empty)))

    def _directory(self, directory: str, rules: IgnoreRules) -> Iterator[tuple[str, IgnoreRules]]:
        """Sorts out one directory. Yields the directories below it that are to be scanned."""
        entries = self._entries(directory)
        names = {entry.name for entry in entries}
        if directory and ("pyvenv.cfg" in names or names >= _HOME):
            # A virtual environment under any name, or a Stoker home: that holds a token and other runs.
            self._new[directory] = (rules.fingerprint, {})
            return
        own = {name: read_rules(self._root / directory / name) for name in NAMES if name in names}
        if any(own.values()):
            rules = rules.extended(directory, {name: content for name, content in own.items() if content})
        known = self._old.get(directory, ("", {}))
        known_names = known[1] if known[0] == rules.fingerprint else {}
        here: dict[str, Any] = {}
        self._new[directory] = (rules.fingerprint, here)
        empty = bool(directory)
        for entry in entries:
            path = f"{directory}/{entry.name}" if directory else entry.name
            is_directory = entry.is_dir(follow_symlinks=False)
            if entry.name in ALWAYS or (self._home is not None and is_directory and entry.path == self._home):
                continue
            if self._ignored(rules, known_names, entry.name, path, is_directory):
                here[_key(entry.name, is_directory)] = False
                continue
            here[_key(entry.name, is_directory)] = True
            if is_directory:
                empty = False
                yield path, rules
            elif self._leaf(entry, path):
                empty = False
        if empty:
            self._empty.append(directory)

    def _entries(self, directory: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._root / directory) as entries:
                return list(entries)
        except FileNotFoundError:
            # Deleted since its parent was read.
            return []
        except OSError as exc:
            raise _unreadable(directory or ".", exc) from exc

    def _ignored(
        self, rules: IgnoreRules, known: dict[str, Any], name: str, path: str, is_directory: bool
    ) -> bool:
        if not rules.fingerprint:
            return False
        before = known.get(_key(name, is_directory))
        if before is not None:
            return before is False
        return rules.ignores(path, is_directory)

    def _leaf(self, entry: os.DirEntry[str], path: str) -> bool:
        """Takes a file or link; False: it is not shipped."""
        try:
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(info.st_mode):
                self._link(path, str((self._root / path).readlink()))
                return True
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(info.st_mode):
            self._warnings.append(f"{path!r} is a socket, pipe or device and is not shipped")
            return False
        if not path.isascii():
            check_path(path)  # before everything is hashed; the tree checks all paths again
        self._found[path] = info
        self._total += info.st_size
        if len(self._found) > CODE_FILES:
            self._too_large(f"the working directory has more than {CODE_FILES} files")
        return True

    def _link(self, path: str, target: str) -> None:
        """Takes a link. In the tree its target is relative, with `..` only at the front; outside of it, absolute."""
        parent = (self._root / path).parent
        real = Path(os.path.realpath(parent / target))
        if not real.is_relative_to(self._root):
            if len(self._outside) >= MAX_LINKS:
                self._too_large(f"the working directory has more than {MAX_LINKS} links that lead out of it")
            check_path(path)
            self._outside[path] = target if target.startswith("/") else str(real)
            return
        simple = os.path.relpath(os.path.normpath(parent / target), parent)
        try:
            check_link(path, simple)
            same = Path(os.path.realpath(parent / simple)) == real
        except SpecError:
            same = False
        self._links[path] = simple if same else os.path.relpath(real, parent)

    def _check_size(self) -> None:
        if self._total > CODE_BYTES:
            self._too_large(
                f"the working directory holds {readable_size(self._total)}, more than {readable_size(CODE_BYTES)}"
            )
        if self._total > WARN_BYTES:
            biggest = ", ".join(f"{name} ({readable_size(size)})" for name, size in self._biggest())
            self._warnings.append(
                f"the working directory holds {readable_size(self._total)}; the largest: {biggest}; "
                "list what the run does not need in .stokerignore"
            )

    def _too_large(self, text: str) -> None:
        biggest = "; ".join(f"{name}: {readable_size(size)}" for name, size in self._biggest())
        raise TooLarge(
            f"{text}. The largest: {biggest}",
            hint="List what the run does not need in .stokerignore, one pattern per line.",
            details={"biggest": dict(self._biggest())},
        )

    def _biggest(self) -> list[tuple[str, int]]:
        sizes: Counter[str] = Counter()
        for path, info in self._found.items():
            parts = path.split("/")
            sizes["/".join(parts[: min(2, len(parts) - 1)]) + "/" if len(parts) > 1 else path] += info.st_size
        return sizes.most_common(5)

    def _hash(self, path: str, seen: os.stat_result) -> tuple[str, os.stat_result]:
        directory, _, name = path.rpartition("/")
        here = self._new[directory][1]
        known = self._old.get(directory, ("", {}))[1].get(name)
        if isinstance(known, list) and tuple(known[:4]) == _identity(seen):
            here[name] = known
            return known[4], seen
        digest, info, started = self._read(path)
        self._hashed += 1
        if max(info.st_mtime_ns, info.st_ctime_ns) < started - RACY_NS:
            here[name] = [*_identity(info), digest]
        return digest, info

    def _read(self, path: str) -> tuple[str, os.stat_result, int]:
        """Hashes a file, which must not change meanwhile."""
        for _ in range(_TRIES):
            started = time.time_ns()
            try:
                with open(self._root / path, "rb", buffering=0, opener=_opener) as handle:
                    before = os.fstat(handle.fileno())
                    digest = hashlib.file_digest(handle, "sha256").hexdigest()
                    after = os.fstat(handle.fileno())
            except FileNotFoundError:
                raise
            except OSError as exc:
                raise _unreadable(path, exc) from exc
            if _identity(before) == _identity(after):
                return digest, after, started
        raise Refused(
            f"{path!r} keeps changing while it is read",
            hint="Wait until it is written, or add it to .stokerignore.",
        )


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)


def _identity(info: os.stat_result) -> tuple[int, int, int, int]:
    return (info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)


def _encodable(path: str) -> bool:
    """Whether a record can have it. A folder of another name was never shipped."""
    try:
        check_path(path)
    except SpecError:
        return False
    return True


def _key(name: str, is_directory: bool) -> str:
    return f"{name}/" if is_directory else name


def _unreadable(path: str, exc: OSError) -> Refused:
    what = "no longer there" if exc.errno == errno.ENOENT else (exc.strerror or str(exc)).lower()
    return Refused(
        f"cannot read {path!r} in the working directory: {what}",
        hint="Make it readable, or add it to .stokerignore.",
    )


def _cache_path(root: Path, cache: Path) -> Path:
    name = hashlib.sha256(os.fsencode(root)).hexdigest()[:32]
    return cache / "trees" / name


def _load(path: Path) -> Cache:
    """The cache of an earlier scan. Empty when it is damaged: everything is hashed again."""
    try:
        head, _, body = path.read_bytes().partition(b"\n")
        if head != _FORMAT + b" %08x" % zlib.crc32(body):
            return {}
        raw = json.loads(body)
        return {directory: (fingerprint, names) for directory, (fingerprint, names) in raw.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _save(path: Path, cache: Cache) -> None:
    body = json.dumps(cache, separators=(",", ":")).encode()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    # A cache that cannot be written (a full or read-only disk) costs time, nothing else.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.write_bytes(_FORMAT + b" %08x\n" % zlib.crc32(body) + body)
        temporary.replace(path)
