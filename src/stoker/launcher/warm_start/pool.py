"""Copies of a body's processes that have imported what takes long, and wait to be those of the next generation.

They are made by the processes themselves (`warm`), one for each; here they are counted out of the body, told to go, and
ended. Where anything is not as it was, or one does not answer, the process is started as the first one was: a spare is never
needed, it is only quicker.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

from stoker.launcher.process.process_tree import ProcessTree
from stoker.launcher.warm_start.standby import LENGTH
from stoker.linux import syscalls

ANSWER = 2.0
"""Seconds in which a spare takes what it is told."""
CHANGING = ("STOKER_", "MASTER_", "PET_", "TORCHELASTIC_", "RANK", "LOCAL_", "WORLD_", "GROUP_", "ROLE_")
"""Variables that each generation has anew, by their beginning. No library reads them when it is imported."""


class Standby:
    """Of one process, by its local rank."""

    def __init__(self, link: socket.socket, likeness: Any) -> None:
        self.link = link
        self.likeness = likeness
        self.ready: Optional[int] = None
        """The one to be told to go; None: there is none now."""
        self.waiting: Set[int] = set()
        """All of them, that one too."""
        self.said = b""


class StandbyPool:
    """One per launcher; outlives the bodies."""

    def __init__(self, tree: ProcessTree, bundle: Optional[str]) -> None:
        self._tree = tree
        self._bundle = bundle
        self._spares: Dict[int, Standby] = {}

    def possible(self, warm: Mapping[str, Any]) -> bool:
        return bool(warm.get("python") and warm.get("program") and self._bundle and self._tree.countable)

    def command(
        self, local: int, warm: Mapping[str, Any], env: Mapping[str, str], directory: str
    ) -> Tuple[List[str], socket.socket]:
        """What to execute for a process that leaves a spare, and the end of its link that it shall inherit."""
        self._drop(local)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._spares[local] = Standby(ours, _likeness(warm, env, directory))
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
        """The number of the spare that has become this process; None: there is none that could."""
        self.look()
        spare = self._spares.get(local)
        if spare is not None and spare.ready is None and spare.waiting:
            # Its turn has come just now. It takes much longer to begin from nothing.
            select.select([spare.link], [], [], ANSWER)
            self.look()
        if spare is None or spare.ready is None or spare.likeness != _likeness(warm, env, directory):
            return None
        pid = spare.ready
        told = json.dumps({"env": dict(env), "directory": directory}).encode()
        ends = array.array("i", [stdout, stderr])
        try:
            spare.link.settimeout(ANSWER)
            head = b"%*d" % (LENGTH, len(told))
            spare.link.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, ends)])
            spare.link.sendall(told)
            spare.link.setblocking(False)
        except OSError:
            self._drop(local)
            return None
        self.exited(pid)
        return pid

    def look(self) -> None:
        """Hear of those that have come, so that they do not count as what a body left behind."""
        for local, spare in list(self._spares.items()):
            try:
                said = spare.link.recv(1 << 12)
            except BlockingIOError:
                continue
            except OSError:
                said = b""
            if not said:
                self._drop(local)
                continue
            *lines, spare.said = (spare.said + said).split(b"\n")
            for line in lines:
                word, _, number = line.partition(b" ")
                if number.isdigit() and _is_child(int(number)):
                    spare.waiting.add(int(number))
                    spare.ready = int(number) if word == b"ready" else spare.ready
        self._count()

    def exited(self, pid: int) -> None:
        """It has ended, or it is a spare no more."""
        for spare in self._spares.values():
            spare.waiting.discard(pid)
            if spare.ready == pid:
                spare.ready = None
        self._count()

    def drop(self) -> None:
        """Let all of them go: nothing will be started here any more."""
        for local in list(self._spares):
            self._drop(local)
        self._count()

    def _drop(self, local: int) -> None:
        """It ends when its link does."""
        spare = self._spares.pop(local, None)
        if spare is not None:
            spare.link.close()

    def _count(self) -> None:
        self._tree.spare({pid for spare in self._spares.values() for pid in spare.waiting})


def _likeness(warm: Mapping[str, Any], env: Mapping[str, str], directory: str) -> Any:
    steady = {name: value for name, value in env.items() if not name.startswith(CHANGING)}
    return warm, steady, directory


def _is_child(pid: int) -> bool:
    fields = syscalls.stat_fields(pid)
    return bool(fields) and int(fields[1]) == os.getpid()
