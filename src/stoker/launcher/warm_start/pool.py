"""The launcher's side of standby processes: copies of a body's processes that have imported torch and wait for the next
generation.

The processes of the body fork them (`standby`), one for each. This module excludes them from the body, starts them and ends
them. If the order differs from the last one, or a standby process does not answer, a new process is started as for the first
generation. A standby process is never necessary, only quicker.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

from stoker.launcher.process.process_tree import ProcessTree
from stoker.launcher.warm_start.standby import HEADER_BYTES
from stoker.linux import syscalls

ANSWER = 2.0
"""Seconds that a standby process has to receive its message."""
CHANGING = ("STOKER_", "MASTER_", "PET_", "TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_", "GROUP_", "ROLE_")
"""Prefixes of variables that differ between generations. No library reads them when it is imported."""


class Standby:
    """The standby processes for one local rank."""

    def __init__(self, link: socket.socket, conditions: Any) -> None:
        self.link = link
        self.conditions = conditions
        self.ready: Optional[int] = None
        """The pid of the one that is to be started next; None: there is none now."""
        self.waiting: Set[int] = set()
        """The pids of all of them."""
        self.received = b""


class StandbyPool:
    """One per launcher, for all its bodies."""

    def __init__(self, tree: ProcessTree, bundle: Optional[str]) -> None:
        self._tree = tree
        self._bundle = bundle
        self._standbys: Dict[int, Standby] = {}

    def possible(self, warm: Mapping[str, Any]) -> bool:
        return bool(warm.get("python") and warm.get("program") and self._bundle and self._tree.countable)

    def command(
        self, local: int, warm: Mapping[str, Any], env: Mapping[str, str], directory: str
    ) -> Tuple[List[str], socket.socket]:
        """The command for a process that forks standby processes, and the end of the link that it inherits."""
        self._drop(local)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._standbys[local] = Standby(ours, _conditions(warm, env, directory))
        modules = ",".join(warm["modules"])
        own = [str(self._bundle), "warm", str(theirs.fileno()), str(os.getpid()), modules]
        return [*warm["python"], *own, *warm["program"]], theirs

    def take(
        self,
        local: int,
        warm: Mapping[str, Any],
        env: Mapping[str, str],
        directory: str,
        stdout: int,
        stderr: int,
    ) -> Optional[int]:
        """Start the standby process for this rank; its pid, or None if there is none that fits."""
        self.update()
        standby = self._standbys.get(local)
        if standby is not None and standby.ready is None and standby.waiting:
            # It is about to be ready. A new process takes much longer.
            select.select([standby.link], [], [], ANSWER)
            self.update()
        if (
            standby is None
            or standby.ready is None
            or standby.conditions != _conditions(warm, env, directory)
        ):
            return None
        pid = standby.ready
        message = json.dumps({"env": dict(env), "directory": directory}).encode()
        ends = array.array("i", [stdout, stderr])
        try:
            standby.link.settimeout(ANSWER)
            head = b"%*d" % (HEADER_BYTES, len(message))
            standby.link.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, ends)])
            standby.link.sendall(message)
            standby.link.setblocking(False)
        except OSError:
            self._drop(local)
            return None
        self.exited(pid)
        return pid

    def update(self) -> None:
        """Read which standby processes there are, so that they do not count as leftovers of a body."""
        for local, standby in list(self._standbys.items()):
            try:
                received = standby.link.recv(1 << 12)
            except BlockingIOError:
                continue
            except OSError:
                received = b""
            if not received:
                self._drop(local)
                continue
            *lines, standby.received = (standby.received + received).split(b"\n")
            for line in lines:
                word, _, number = line.partition(b" ")
                if number.isdigit() and _is_child(int(number)):
                    standby.waiting.add(int(number))
                    standby.ready = int(number) if word == b"ready" else standby.ready
        self._count()

    def exited(self, pid: int) -> None:
        """A process has ended, or is no longer a standby process."""
        for standby in self._standbys.values():
            standby.waiting.discard(pid)
            if standby.ready == pid:
                standby.ready = None
        self._count()

    def drop(self) -> None:
        """End all of them: nothing more will be started here."""
        for local in list(self._standbys):
            self._drop(local)
        self._count()

    def _drop(self, local: int) -> None:
        """A standby process ends when its link is closed."""
        standby = self._standbys.pop(local, None)
        if standby is not None:
            standby.link.close()

    def _count(self) -> None:
        self._tree.exclude({pid for standby in self._standbys.values() for pid in standby.waiting})


def _conditions(warm: Mapping[str, Any], env: Mapping[str, str], directory: str) -> Any:
    steady = {name: value for name, value in env.items() if not name.startswith(CHANGING)}
    return warm, steady, directory


def _is_child(pid: int) -> bool:
    fields = syscalls.stat_fields(pid)
    return bool(fields) and int(fields[1]) == os.getpid()
