"""Layers: trees of files, written so that the same tree always gives the same bytes.

Names are sorted, all times are equal, the owner is root unless given, and gzip has no time. Nothing of the building
machine appears in a layer.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final

from stoker.errors import ImageError

EPOCH: Final = 315_619_200
"""The time of every file: 2 January 1980. Zip archives cannot hold earlier times, and users zip installed files."""
_LEVEL = 6
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One name in a tree. Without content and target it is a directory."""

    mode: int
    data: bytes | Path | None = None
    """Content of a file. A Path is read when the layer is written."""
    target: str | None = None
    """Target of a symbolic link."""
    uid: int = 0
    gid: int = 0

    @property
    def is_directory(self) -> bool:
        return self.data is None and self.target is None

    def read(self) -> bytes:
        return self.data.read_bytes() if isinstance(self.data, Path) else self.data or b""


class LayerTree:
    """Names and their entries, relative to the root of an image. A later entry replaces an earlier one."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def file(self, name: str, data: bytes | str | Path, mode: int = 0o644) -> None:
        self.put(name, Entry(mode, data.encode() if isinstance(data, str) else data))

    def directory(self, name: str, mode: int = 0o755, *, owner: int = 0) -> None:
        self.put(name, Entry(mode, uid=owner, gid=owner))

    def link(self, name: str, target: str) -> None:
        self.put(name, Entry(0o777, target=target))

    def put(self, name: str, entry: Entry) -> None:
        self._entries[_clean(name)] = entry

    def add(self, other: LayerTree) -> None:
        self._entries.update(other._entries)

    def copy(self, source: Path, name: str = "", keep: Callable[[str], bool] = lambda _: True) -> None:
        """Adds a directory of this machine below `name`. `keep` decides for each path relative to `source`.

        Of a mode only "executable" is kept: the rest depends on the umask under which the file was unpacked.
        """
        for folder, folders, files in os.walk(source):
            folders.sort()
            for base in sorted([*folders, *files]):
                path = Path(folder) / base
                relative = path.relative_to(source).as_posix()
                if not keep(relative):
                    continue
                self.put(f"{name}/{relative}", _of(path))

    def remove(self, name: str) -> None:
        """Removes a name and everything below it."""
        name = _clean(name)
        for one in [one for one in self._entries if one == name or one.startswith(name + "/")]:
            del self._entries[one]

    def get(self, name: str) -> Entry | None:
        return self._entries.get(_clean(name))

    def __iter__(self) -> Iterator[tuple[str, Entry]]:
        """Sorted, including parent directories without an entry."""
        names = set(self._entries)
        for name in self._entries:
            while "/" in name:
                name = name.rpartition("/")[0]
                names.add(name)
        for name in sorted(names):
            yield name, self._entries.get(name) or Entry(0o755)

    def __len__(self) -> int:
        return len(self._entries)

    def unpack(self, root: Path) -> None:
        """Writes the tree to this machine as its user, to run programs of an image that is being built."""
        root.mkdir(parents=True, exist_ok=True)
        for name, entry in self:
            path = root / name
            if not path.resolve().is_relative_to(root.resolve()):
                raise ImageError(f"{name!r} is below a link that leads out of the image")
            if entry.is_directory:
                path.mkdir(exist_ok=True)
            elif entry.target is not None:
                path.symlink_to(entry.target)
            else:
                path.write_bytes(entry.read())
                path.chmod(entry.mode & 0o755 | 0o600)


@dataclass(frozen=True)
class Layer:
    """A layer in a file."""

    path: Path
    digest: str
    """Digest of the compressed bytes: its name in registries."""
    diff_id: str
    """Digest of the tar inside: its name in configs."""
    size: int
    made_by: str = ""

    def described(self, made_by: str) -> Layer:
        return replace(self, made_by=made_by)


def write_layer(tree: LayerTree, path: Path) -> Layer:
    """Writes the tree as a gzipped tar to `path`, which appears complete or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as raw:
            outer = _Hashing(raw)
            with gzip.GzipFile("", "wb", _LEVEL, outer, mtime=0) as packed:
                inner = _Hashing(packed)
                _write_tar(tree, inner)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return Layer(path, outer.digest(), inner.digest(), outer.size)


class _Hashing(io.RawIOBase):
    def __init__(self, target: IO[bytes] | gzip.GzipFile) -> None:
        self._target = target
        self._hash = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self._target.write(data)
        self._hash.update(data)
        self.size += len(data)
        return len(data)

    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def _write_tar(tree: LayerTree, out: _Hashing) -> None:
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK) as tar:
        for name, entry in tree:
            info = tarfile.TarInfo(name)
            info.mtime, info.uid, info.gid, info.mode = EPOCH, entry.uid, entry.gid, entry.mode & 0o7777
            if entry.is_directory:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            elif entry.target is not None:
                info.type, info.linkname = tarfile.SYMTYPE, entry.target
                tar.addfile(info)
            else:
                data = entry.read()
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def _of(path: Path) -> Entry:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return Entry(0o777, target=str(path.readlink()))
    if stat.S_ISDIR(found.st_mode):
        return Entry(0o755)
    if not stat.S_ISREG(found.st_mode):
        raise ImageError(f"{path} is neither a file, a directory nor a link: it cannot be put into an image")
    return Entry(0o755 if found.st_mode & 0o111 else 0o644, path)


def _clean(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or "\0" in name:
        raise ImageError(f"{name!r} is not a name inside an image")
    return "/".join(parts)
