"""The processes of a body: finding them, asking them to end, ending them.

The launcher is either init of its own PID namespace or a subreaper. Both ways every process of the body,
however it daemonised, is a descendant of the launcher: the tree is empty exactly when the launcher has no
children left.
"""

from __future__ import annotations

import os
import signal
from typing import AbstractSet, Any, Dict, FrozenSet, List, Mapping, Optional, Tuple

from stoker.linux import syscalls

Exit = Tuple[int, int, Any]
"""pid, wait status, rusage"""

_SIGTERM_BIT = 1 << (signal.SIGTERM - 1)


class ProcessTree:
    """One per launcher. Everything that the launcher's process forks and that is still there belongs to it."""

    def __init__(self, cgroup: Optional[Mapping[str, Any]] = None, contained: bool = False) -> None:
        """`contained`: in a container that others may enter (a shell), who are not ours to kill."""
        self.namespace = os.getpid() == 1 and not contained
        self.cgroup = cgroup
        self.empty = True
        """No process was left when last looked (`reap`)."""
        self.spared: FrozenSet[int] = frozenset()
        """Children that are no part of the body, and outlive it (`spares`)."""

    @property
    def countable(self) -> bool:
        """Whether children can be told apart: we know them by the numbers that they know themselves by."""
        return syscalls.LINUX and _own_number() == os.getpid()

    def spare(self, pids: AbstractSet[int]) -> None:
        """These are no part of the body from now on."""
        if self.spared != pids:
            self.spared = frozenset(pids)
            self.empty = self.empty or self._only_spared()

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
                self.empty = self._only_spared()
                return found
            found.append((pid, status, usage))

    def pids(self) -> List[int]:
        """Every process of the tree, as numbered by the /proc that is mounted here."""
        return [pid for pid in descendants(_own_number()) if pid not in self.spared]

    def _only_spared(self) -> bool:
        return bool(self.spared) and self.spared.issuperset(children(os.getpid()))

    def terminate(self) -> None:
        """Ask the tree to end.

        A process that handles SIGTERM answers for its own children: signalling a data loader's workers would
        break the very checkpoint the trainer is asked to write. The children of a process that does not
        handle it (a shell, a wrapper) would hear nothing, so they are asked themselves.
        """
        if not syscalls.LINUX:
            _signal_groups(signal.SIGTERM)
            return
        me = _own_number()
        if me != os.getpid():
            _kill(-1, signal.SIGTERM)
            return
        waiting = [pid for pid in children(me) if pid not in self.spared]
        while waiting:
            pid = waiting.pop()
            beneath = [] if _handles_sigterm(pid) else children(pid)
            _kill(pid, signal.SIGTERM)
            waiting.extend(beneath)

    def kill(self) -> None:
        """SIGKILL everything. Called again until the tree is empty: processes may be forking meanwhile."""
        thaw(self.cgroup)
        if self.spared:
            for pid in self.pids():
                _kill(pid, signal.SIGKILL)
        elif self.namespace:
            _kill(-1, signal.SIGKILL)
        else:
            kill_beneath(os.getpid(), self.cgroup)


def thaw(cgroup: Optional[Mapping[str, Any]]) -> None:
    """A frozen process does not even die."""
    if not cgroup or not cgroup.get("freezer"):
        return
    name, value = ("freezer.state", "THAWED") if cgroup.get("version") == 1 else ("cgroup.freeze", "0")
    _write(os.path.join(cgroup["freezer"], name), value)


def kill_beneath(root: int, cgroup: Optional[Mapping[str, Any]] = None) -> None:
    """One round of SIGKILL for the descendants of `root` and what is in the body's cgroup."""
    if not syscalls.LINUX:
        _signal_groups(signal.SIGKILL)
        return
    found = set(descendants(root))
    for path in (cgroup or {}).get("procs", [])[:1]:
        _write(os.path.join(os.path.dirname(path), "cgroup.kill"), "1")
        found.update(int(word) for word in syscalls.read_text(path).split() if word != "0")
    found.discard(os.getpid())
    found.discard(root)
    for pid in found:
        _kill(pid, signal.SIGKILL)


def descendants(root: int) -> List[int]:
    found: List[int] = []
    waiting = children(root)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting.extend(children(pid))
    return found


def children(pid: int) -> List[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        return _by_parent().get(pid, [])
    found: List[int] = []
    for thread in threads:
        found.extend(int(word) for word in syscalls.read_text(f"/proc/{pid}/task/{thread}/children").split())
    return found


def _by_parent() -> Dict[int, List[int]]:
    """For kernels without /proc/PID/task/TID/children."""
    found: Dict[int, List[int]] = {}
    for name in os.listdir("/proc"):
        fields = syscalls.stat_fields(int(name)) if name.isdigit() else []
        if fields:
            found.setdefault(int(fields[1]), []).append(int(name))
    return found


def _own_number() -> int:
    """Our pid in the /proc that is mounted here: another one where a namespace could not mount its own."""
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
"""Sessions of bodies, for systems without /proc (macOS): all that can be signalled there."""


def remember(pid: int) -> None:
    if not syscalls.LINUX:
        _groups.append(pid)


def _signal_groups(number: int) -> None:
    for group in _groups:
        try:
            os.killpg(group, number)
        except OSError:
            # It is empty.
            pass


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        # Gone already, or a set-uid program that only the kernel's namespace can end for us.
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
