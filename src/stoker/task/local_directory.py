"""A task directory on this machine, read and written by the server.

User code owns the directory, so nothing in it is trusted: every path is opened component by component beneath the root,
links are never followed, and only regular files are read. Anything else reads as absent or raises `UnsafePath`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Type

from stoker.linux.descriptors import Closing
from stoker.task import formats, layout


class UnsafePath(OSError):
    """The path leaves the directory, goes through a link, or is not a regular file."""


class LocalTaskDir:
    """Cheap to create; keeps no descriptors open between calls; may be used from any thread."""

    shares = False

    def __init__(
        self,
        root: str,
        collect: Optional[Callable[[str, int], None]] = None,
        shared_folder: Optional[str] = None,
    ) -> None:
        """`collect`: settles a directory after its launcher's death (`stoker.launcher.recovery.collect`). `shared_folder`: the
        working folder that the tasks of its attempt share."""
        self.root = root
        self.shared_folder = shared_folder
        self._collect = collect

    @property
    def folder(self) -> Tuple[str, str]:
        """The working folder: a directory that no run can write, and the name in it."""
        return os.path.split(self.shared_folder or os.path.join(self.root, layout.CODE))

    @property
    def turns(self) -> Optional[str]:
        return f"{self.root}/{layout.TURNS}"

    def settle(self, generation: int) -> None:
        if self._collect is None:
            raise RuntimeError(f"{self.root} was opened without a way to settle it")
        self._collect(self.root, generation)

    def catch_up(self, timeout: float) -> bool:
        return True

    def abandon(self, reason: str) -> None:
        """Nothing to do: a local directory needs no network."""

    # -- writing ---------------------------------------------------------------------------------------------

    def write_order(self, order: formats.Order) -> None:
        """Not synced to the disk: after a power cut the launcher is gone too, and the task is lost."""
        self._write(layout.ORDER, order.to_json())

    def write_secrets(self, values: Mapping[str, str]) -> None:
        self._write(layout.SECRETS, dict(values))

    def forget_secrets(self) -> None:
        root = self._directory("")
        try:
            os.unlink(layout.SECRETS, dir_fd=root)
        except FileNotFoundError:
            pass
        finally:
            os.close(root)

    def append(self, path: str, value: Mapping[str, Any]) -> None:
        """Append a JSON line to a file beneath the root and sync it."""
        parent, name = self._parent(path)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with Closing(parent):
            fd = _regular(name, flags, parent, path)
        with Closing(fd):
            # Ends a line that a full disk or a power cut left incomplete.
            formats.write_all(fd, b"\n")
            formats.append_line(fd, value, durable=True)

    # -- reading ---------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        return os.path.isdir(self.root)

    def info(self) -> Optional[formats.TaskInfo]:
        return self._record(layout.TASK, formats.TaskInfo)

    def order(self) -> Optional[formats.Order]:
        return self._record(layout.ORDER, formats.Order)

    def status(self) -> Optional[formats.Status]:
        return self._record(layout.STATUS, formats.Status)

    def journal(self, offset: int = 0) -> Tuple[List[Dict[str, Any]], int]:
        """Complete entries after `offset`, and the offset for the next call."""
        return self.lines(layout.JOURNAL, offset)

    def lines(self, path: str, offset: int, limit: int = 4 << 20) -> Tuple[List[Dict[str, Any]], int]:
        """JSON lines of a file after `offset`, and the offset for the next call. A line longer than `limit` is skipped,
        since the reader could never get past it."""
        data = self.read(path, offset, limit)
        lines, used = formats.split_lines(data)
        if not used and len(data) >= limit:
            used = len(data)
        return list(formats.parse_lines(lines)), offset + used

    def read(self, path: str, offset: int = 0, limit: int = 1 << 20) -> bytes:
        """Bytes of a regular file beneath the root; empty when it does not exist."""
        try:
            fd = self.open(path)
        except FileNotFoundError:
            return b""
        with Closing(fd):
            return os.pread(fd, limit, offset)

    def size(self, path: str) -> int:
        try:
            fd = self.open(path)
        except FileNotFoundError:
            return 0
        with Closing(fd):
            return os.fstat(fd).st_size

    def open(self, path: str) -> int:
        """A descriptor of a regular file beneath the root. The caller closes it."""
        parent, name = self._parent(path)
        with Closing(parent):
            return _regular(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, parent, path)

    def list(self, path: str = "") -> List[str]:
        """Names in a directory beneath the root, sorted; empty when it does not exist."""
        try:
            fd = self._directory(path)
        except FileNotFoundError:
            return []
        with Closing(fd):
            return sorted(os.listdir(fd))

    # -- helpers ---------------------------------------------------------------------------------------------

    def _record(self, path: str, kind: Type[formats.T]) -> Optional[formats.T]:
        """None when there is no such file, or it is not valid."""
        try:
            raw = self.read(path)
            value = json.loads(raw) if raw else None
            return kind.from_json(value) if isinstance(value, dict) else None
        except (UnsafePath, ValueError, TypeError, RecursionError):
            return None

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace a file of the root directory in one step, mode 0600, whatever user code has put there."""
        temporary = f"{name}.{os.getpid()}.tmp"
        with Closing(self._directory("")) as root:
            with Closing(formats.create(temporary, 0o600, dir_fd=root)) as fd:
                formats.write_all(fd, json.dumps(value, separators=(",", ":")).encode())
            os.replace(temporary, name, src_dir_fd=root, dst_dir_fd=root)

    def _parent(self, path: str) -> Tuple[int, str]:
        parts = path.split("/")
        return self._directory("/".join(parts[:-1])), _checked(parts[-1], path)

    def _directory(self, path: str) -> int:
        try:
            fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.ENOTDIR):
                raise UnsafePath(errno.EPERM, "not a directory", self.root) from exc
            raise
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


def _regular(name: str, flags: int, parent: int, path: str) -> int:
    """A descriptor of a regular file in an open directory. `path`: its name in errors."""
    try:
        fd = os.open(name, flags, 0o600, dir_fd=parent)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP):
            raise UnsafePath(errno.EPERM, "not a regular file", path) from exc
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnsafePath(errno.EPERM, "not a regular file", path)
    return fd


def _checked(part: str, path: str) -> str:
    if part in ("", ".", "..") or "\0" in part or "/" in part:
        raise UnsafePath(errno.EPERM, "not a path beneath the task directory", path)
    return part
