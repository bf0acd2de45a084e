"""The few kernel calls that Python does not offer: prctl, unshare, setns, mount, and small reads of /proc.

libc is loaded on first use, so this module can be imported anywhere. Where a call is missing, the helpers raise `OSError`,
or return None or False if the launcher can do without it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from typing import Any, Dict, Iterable, List, Optional

LINUX = sys.platform.startswith("linux")

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_SLAVE = 4096, 16384, 1 << 19
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36

_libc: Any = None


def libc() -> Any:
    global _libc
    if _libc is None:
        _libc = ctypes.CDLL(None, use_errno=True)
    return _libc


def subreaper() -> bool:
    """Orphaned descendants become children of this process, so that none of them is missed."""
    return LINUX and libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def die_with_parent(signal_number: int) -> bool:
    return LINUX and libc().prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0) == 0


def set_name(name: str) -> None:
    """Set the name that `ps` and `top` show."""
    if LINUX:
        libc().prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def unshare(flags: int) -> None:
    if libc().unshare(flags) != 0:
        raise _error("unshare")


def setns(fd: int, kind: int) -> None:
    if libc().setns(fd, kind) != 0:
        raise _error("setns")


def mount(
    source: Optional[str], target: str, kind: Optional[str], flags: int, data: Optional[str] = None
) -> None:
    source_, target_, kind_, data_ = [
        None if text is None else os.fsencode(text) for text in (source, target, kind, data)
    ]
    if libc().mount(source_, target_, kind_, ctypes.c_ulong(flags), data_) != 0:
        raise _error(f"mount {target}")


def unmount(target: str) -> None:
    """Detach a mount and everything mounted beneath it, without waiting for its users."""
    if libc().umount2(os.fsencode(target), MNT_DETACH) != 0:
        raise _error(f"unmount {target}")


_SYSINFO_WORDS = 14
_SHARED, _UNIT = 6, 13


def shared_memory() -> int:
    """Bytes that the whole machine has in tmpfs, memfds and shared mappings; 0 where the kernel does not tell.

    A single system call, because it is read often.
    """
    if not LINUX or ctypes.sizeof(ctypes.c_ulong) != 8:
        return 0
    words = (ctypes.c_ulong * (2 * _SYSINFO_WORDS))()
    if libc().sysinfo(words) != 0:
        return 0
    return int(words[_SHARED]) * (int(words[_UNIT]) & 0xFFFFFFFF)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)} ({errno.errorcode.get(number, str(number))})")


def start_time(pid: int) -> Optional[int]:
    """Field 22 of /proc/PID/stat. Boot id, pid and start time together identify a process."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def stat_fields(pid: int) -> List[str]:
    """/proc/PID/stat from its third field (the state) on; empty when there is no such process."""
    text = read_text(f"/proc/{pid}/stat")
    return text[text.rfind(")") + 2 :].split()


def descendants(root: int) -> List[int]:
    found: List[int] = []
    waiting = children(root)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting.extend(children(pid))
    return found


def children(pid: int) -> List[int]:
    """Direct children of all threads of the process."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        return _by_parent().get(pid, [])
    found: List[int] = []
    for thread in threads:
        found.extend(int(word) for word in read_text(f"/proc/{pid}/task/{thread}/children").split())
    return found


def _by_parent() -> Dict[int, List[int]]:
    """For kernels without /proc/PID/task/TID/children."""
    found: Dict[int, List[int]] = {}
    for name in os.listdir("/proc"):
        fields = stat_fields(int(name)) if name.isdigit() else []
        if fields:
            found.setdefault(int(fields[1]), []).append(int(name))
    return found


def read_text(path: str) -> str:
    """The whole of a small file; empty when it cannot be read (a process or cgroup that is gone)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        parts: List[bytes] = []
        while True:
            part = os.read(fd, 65536)
            if not part:
                return b"".join(parts).decode("utf-8", "replace")
            parts.append(part)
    except OSError:
        return ""
    finally:
        os.close(fd)


def close_fds(keep: Iterable[int] = ()) -> None:
    """Close every descriptor above 2 but those in `keep`."""
    kept = set(keep)
    try:
        names = os.listdir("/proc/self/fd" if LINUX else "/dev/fd")
    except OSError:
        names = [str(fd) for fd in range(3, 1024)]
    for name in names:
        fd = int(name)
        if fd > 2 and fd not in kept:
            try:
                os.close(fd)
            except OSError:
                pass
