"""The processes of a body: lists, terminates and kills them.

The launcher is either init of its own PID namespace or a subreaper. So every process of the body, even a daemon, is a descendant
of the launcher, and the tree is empty exactly when the launcher has no children.
"""

from __future__ import annotations

import os
import signal
from typing import AbstractSet, Any, FrozenSet, List, Mapping, Optional, Tuple

from stoker.linux import syscalls

Exit = Tuple[int, int, Any]
"""pid, wait status, rusage"""

_SIGTERM_BIT = 1 << (signal.SIGTERM - 1)


class ProcessTree:
    """One per launcher. It consists of all live descendants of the launcher's process."""

    def __init__(self, cgroup: Optional[Mapping[str, Any]] = None, contained: bool = False) -> None:
        """`contained`: the launcher is in a container, which may also have processes that it must not kill (a user's
        shell)."""
        self.namespace = os.getpid() == 1 and not contained
        self.cgroup = cgroup
        self.empty = True
        """Whether no process was left at the last `reap`."""
        self.excluded: FrozenSet[int] = frozenset()
        """Children that are not part of the body and outlive it: the standby processes."""

    @property
    def countable(self) -> bool:
        """Whether pids here are those that the children see themselves, so that children can be told apart."""
        return syscalls.LINUX and _own_number() == os.getpid()

    def exclude(self, pids: AbstractSet[int]) -> None:
        """Exclude these processes from the body from now on."""
        if self.excluded != pids:
            self.excluded = frozenset(pids)
            self.empty = self.empty or self._only_excluded_left()

    def reap(self) -> List[Exit]:
        """Processes that have ended since the last call, orphans included."""
        found: List[Exit] = []
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self.empty = True
                return found
            if pid == 0:
                self.empty = self._only_excluded_left()
                return found
            found.append((pid, status, usage))

    def pids(self) -> List[int]:
        """Every process of the tree, with its pid in the /proc that is mounted here."""
        return [pid for pid in syscalls.descendants(_own_number()) if pid not in self.excluded]

    def _only_excluded_left(self) -> bool:
        return bool(self.excluded) and self.excluded.issuperset(syscalls.children(os.getpid()))

    def terminate(self) -> None:
        """Send SIGTERM to the tree.

        A process that handles SIGTERM is responsible for its own children: a SIGTERM to the workers of a data loader would
        spoil the checkpoint that the trainer is about to write. The children of a process that does not handle it (a
        shell, a wrapper) get SIGTERM too.
        """
        if not syscalls.LINUX:
            _signal_groups(signal.SIGTERM)
            return
        me = _own_number()
        if me != os.getpid():
            _kill(-1, signal.SIGTERM)
            return
        waiting = [pid for pid in syscalls.children(me) if pid not in self.excluded]
        while waiting:
            pid = waiting.pop()
            beneath = [] if _handles_sigterm(pid) else syscalls.children(pid)
            _kill(pid, signal.SIGTERM)
            waiting.extend(beneath)

    def kill(self) -> None:
        """Send SIGKILL to all. Call it again until the tree is empty: processes may fork meanwhile."""
        thaw(self.cgroup)
        if self.excluded:
            for pid in self.pids():
                _kill(pid, signal.SIGKILL)
        elif self.namespace:
            _kill(-1, signal.SIGKILL)
        else:
            kill_beneath(os.getpid(), self.cgroup)


def thaw(cgroup: Optional[Mapping[str, Any]]) -> None:
    """Thaw the control group: a frozen process cannot be killed in version 1."""
    if not cgroup or not cgroup.get("freezer"):
        return
    name, value = ("freezer.state", "THAWED") if cgroup.get("version") == 1 else ("cgroup.freeze", "0")
    _write(os.path.join(cgroup["freezer"], name), value)


def kill_beneath(root: int, cgroup: Optional[Mapping[str, Any]] = None) -> None:
    """Send SIGKILL once to the descendants of `root` and to the processes of the body's cgroup."""
    if not syscalls.LINUX:
        _signal_groups(signal.SIGKILL)
        return
    found = set(syscalls.descendants(root))
    for path in (cgroup or {}).get("procs", [])[:1]:
        _write(os.path.join(os.path.dirname(path), "cgroup.kill"), "1")
        found.update(int(word) for word in syscalls.read_text(path).split() if word != "0")
    found.discard(os.getpid())
    found.discard(root)
    for pid in found:
        _kill(pid, signal.SIGKILL)


def _own_number() -> int:
    """The pid of this process in the /proc that is mounted here, which may belong to an outer namespace."""
    try:
        return int(os.readlink("/proc/self"))
    except (OSError, ValueError):
        return os.getpid()


def _handles_sigterm(pid: int) -> bool:
    for line in syscalls.read_text(f"/proc/{pid}/status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) & _SIGTERM_BIT)
    return False


_groups: List[int] = []
"""Sessions of bodies, for systems without /proc (macOS), where only these can be signalled."""


def remember(pid: int) -> None:
    if not syscalls.LINUX:
        _groups.append(pid)


def _signal_groups(number: int) -> None:
    for group in _groups:
        try:
            os.killpg(group, number)
        except OSError:
            # The group is empty.
            pass


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        # It has ended, or is a set-uid program, which only the end of the namespace kills.
        pass


def _write(path: str, value: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(fd, value.encode())
    except OSError:
        pass
    finally:
        os.close(fd)
