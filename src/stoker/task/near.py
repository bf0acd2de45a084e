"""A task directory on this machine, read and written by the server.

User code owns the directory and everything in it, so nothing in it is believed: every path is opened
component by component beneath the root, links are never followed, and only regular files are read. A file
that is not what it should be reads as absent or raises `UnsafePath`, and never leads outside.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any, Dict, List, Mapping, Optional, Tuple

from stoker.task import formats, layout


class UnsafePath(OSError):
    """The path leaves the directory, goes through a link, or is not a regular file."""


class Entry:
    """One file found by `walk`."""

    __slots__ = ("mode", "mtime_ns", "path", "size")

    def __init__(self, path: str, size: int, mtime_ns: int, mode: int) -> None:
        self.path = path
        self.size = size
        self.mtime_ns = mtime_ns
        self.mode = mode


class NearTaskDir:
    """Cheap to make; holds no descriptors between calls; may be used from any thread."""

    def __init__(self, root: str) -> None:
        self.root = root

    # -- what the server writes ------------------------------------------------------------------------------

    def write_order(self, order: formats.Order) -> None:
        formats.write_json(os.path.join(self.root, layout.ORDER), order.to_json(), mode=0o600, durable=True)

    def write_secrets(self, values: Mapping[str, str]) -> None:
        formats.write_json(os.path.join(self.root, layout.SECRETS), dict(values), mode=0o600)

    def forget_secrets(self) -> None:
        try:
            os.unlink(os.path.join(self.root, layout.SECRETS))
        except FileNotFoundError:
            pass

    # -- what the server reads -------------------------------------------------------------------------------

    def exists(self) -> bool:
        return os.path.isdir(self.root)

    def info(self) -> Optional[formats.TaskInfo]:
        raw = self._json(layout.TASK)
        return None if raw is None else formats.TaskInfo.from_json(raw)

    def order(self) -> Optional[formats.Order]:
        raw = self._json(layout.ORDER)
        return None if raw is None else formats.Order.from_json(raw)

    def status(self) -> Optional[formats.Status]:
        raw = self._json(layout.STATUS)
        return None if raw is None else formats.Status.from_json(raw)

    def journal(self, offset: int = 0) -> Tuple[List[Dict[str, Any]], int]:
        """Complete entries after `offset`, and the offset to come back with."""
        return self.lines(layout.JOURNAL, offset)

    def lines(self, path: str, offset: int, limit: int = 4 << 20) -> Tuple[List[Dict[str, Any]], int]:
        """JSON lines of a file after `offset`, and the offset to come back with."""
        lines, used = formats.split_lines(self.read(path, offset, limit))
        return list(formats.parse_lines(lines)), offset + used

    def read(self, path: str, offset: int = 0, limit: int = 1 << 20) -> bytes:
        """Bytes of a regular file beneath the root; empty when it does not exist."""
        try:
            fd = self.open(path)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(fd, limit, offset)
        finally:
            os.close(fd)

    def size(self, path: str) -> int:
        try:
            fd = self.open(path)
        except FileNotFoundError:
            return 0
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def open(self, path: str) -> int:
        """A descriptor of a regular file beneath the root. The caller closes it."""
        parent, name = self._parent(path)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP):
                raise UnsafePath(errno.EPERM, "not a regular file", path) from exc
            raise
        finally:
            os.close(parent)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise UnsafePath(errno.EPERM, "not a regular file", path)
        return fd

    def list(self, path: str = "") -> List[str]:
        """Names in a directory beneath the root, sorted; empty when it does not exist."""
        try:
            fd = self._directory(path)
        except FileNotFoundError:
            return []
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def walk(self, path: str = "", *, max_entries: int = 1_000_000) -> List[Entry]:
        """Every regular file beneath a directory, sorted by path; links and devices are passed over."""
        try:
            fd = self._directory(path)
        except FileNotFoundError:
            return []
        found: List[Entry] = []
        try:
            self._walk(fd, "", found, max_entries)
        finally:
            os.close(fd)
        found.sort(key=lambda entry: entry.path)
        return found

    # -- how -------------------------------------------------------------------------------------------------

    def _json(self, path: str) -> Optional[Dict[str, Any]]:
        try:
            raw = self.read(path)
            value = json.loads(raw) if raw else None
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    def _parent(self, path: str) -> Tuple[int, str]:
        parts = path.split("/")
        return self._directory("/".join(parts[:-1])), _checked(parts[-1], path)

    def _directory(self, path: str) -> int:
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in [part for part in path.split("/") if part]:
            try:
                child = os.open(
                    _checked(part, path),
                    os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC,
                    dir_fd=fd,
                )
            except OSError as exc:
                if exc.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise UnsafePath(errno.EPERM, "not a directory", path) from exc
                raise
            finally:
                os.close(fd)
            fd = child
        return fd

    def _walk(self, fd: int, prefix: str, found: List[Entry], max_entries: int) -> None:
        for name in os.listdir(fd):
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISREG(info.st_mode):
                found.append(Entry(prefix + name, info.st_size, info.st_mtime_ns, stat.S_IMODE(info.st_mode)))
                if len(found) > max_entries:
                    raise UnsafePath(errno.EFBIG, f"more than {max_entries} files", prefix)
            elif stat.S_ISDIR(info.st_mode):
                child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                try:
                    self._walk(child, f"{prefix}{name}/", found, max_entries)
                finally:
                    os.close(child)


def _checked(part: str, path: str) -> str:
    if part in ("", ".", "..") or "\0" in part or "/" in part:
        raise UnsafePath(errno.EPERM, "not a path beneath the task directory", path)
    return part
