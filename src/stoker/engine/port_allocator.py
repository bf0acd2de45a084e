"""Ports for tasks that share this machine's address: no two tasks are given the same one.

`PortAllocator.take(n)`, `PortAllocator.give(ports)`, and after a restart of the server `PortAllocator.adopt(ports)`.

A task listens long after its port was chosen, so a port that is free now is not enough:

- The kernel hands out local ports of outgoing connections from its ephemeral range, at any moment. Ports are chosen
  outside it.
- Several homes may run on one machine. Each port is locked by an abstract Unix socket that bears its number: seen
  by all processes of this network, whoever owns them, and gone with the process that holds it. No file stays behind.
- Other programs know nothing of all this. So a port is also bound for a moment before it is given.

Where there are no abstract sockets (macOS) only the last check is left, and two homes may, rarely, meet.
"""

from __future__ import annotations

import errno
import random
import socket
import sys
import threading
from collections.abc import Iterable, Iterator

from stoker.errors import EngineError
from stoker.linux.syscalls import read_text

LOWEST = 20_000
"""Below it live the well-known services of a machine."""
HIGHEST = 30_000
"""From here on Kubernetes forwards the ports of its services, on a machine that is also a node of a cluster."""
ENOUGH = 1_000
"""A range with fewer ports than this is not worth having: another one is looked for."""
EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"
LOCK = "\0stoker-port-{}"


class PortAllocator:
    """The ports that this server's tasks have. Any thread may call it.

    What is taken stays locked until it is given back or this process ends; a new process calls `adopt` with what
    its records say. Ports that were given back are the last to be taken again, for somebody may still knock there.
    """

    def __init__(self, choice: range | None = None) -> None:
        self._choice = choice or usable(read_text(EPHEMERAL))
        self._next = random.randrange(
            len(self._choice)
        )  # homes that start together do not race for the same ones
        self._held: dict[int, socket.socket | None] = {}
        self._mutex = threading.Lock()

    def take(self, count: int) -> tuple[int, ...]:
        """So many ports that nobody has; all or an error."""
        with self._mutex:
            taken: list[int] = []
            for port in self._round():
                if len(taken) == count:
                    break
                if self._try(port):
                    taken.append(port)
            if len(taken) < count:
                self._drop(taken)
                first, last = self._choice[0], self._choice[-1]
                raise EngineError(
                    f"{count} ports are needed, and of {first} to {last} only {len(taken)} are free",
                    hint="End what listens there (`ss -ltn` shows it), or ask for fewer workers.",
                )
            return tuple(taken)

    def adopt(self, ports: Iterable[int]) -> tuple[int, ...]:
        """These belong to tasks that run already, so nobody else may have them. Returns those that somebody else
        locked meanwhile: the task keeps them while it lives, its next generation needs others."""
        with self._mutex:
            lost = []
            for port in ports:
                if port in self._held:
                    continue
                locked, lock = _lock(port)
                if locked:
                    self._held[port] = lock
                else:
                    lost.append(port)
            return tuple(lost)

    def give(self, ports: Iterable[int]) -> None:
        """Nobody needs them any more. Unknown ones are fine."""
        with self._mutex:
            self._drop(ports)

    def close(self) -> None:
        """Give all of them back."""
        self.give(list(self._held))

    @property
    def taken(self) -> frozenset[int]:
        return frozenset(self._held)

    def _round(self) -> Iterator[int]:
        """Each port once, from where the last round ended."""
        for _ in range(len(self._choice)):
            yield self._choice[self._next]
            self._next = (self._next + 1) % len(self._choice)

    def _try(self, port: int) -> bool:
        if port in self._held:
            return False
        locked, lock = _lock(port)
        if not locked:
            return False
        if not _is_free(port):
            if lock is not None:
                lock.close()
            return False
        self._held[port] = lock
        return True

    def _drop(self, ports: Iterable[int]) -> None:
        for port in ports:
            lock = self._held.pop(port, None)
            if lock is not None:
                lock.close()


def usable(ephemeral: str) -> range:
    """The ports to choose from, given the kernel's range as it writes it (`32768\\t60999`; empty: not known)."""
    words = ephemeral.split()
    start, end = (int(words[0]), int(words[1])) if len(words) == 2 else (32_768, 65_535)
    for choice in (
        range(LOWEST, min(start, HIGHEST)),
        range(LOWEST, start),
        range(max(LOWEST, end + 1), 65_536),
        range(1_024, start),
    ):
        if len(choice) >= ENOUGH:
            return choice
    return range(LOWEST, HIGHEST)  # all of them are ephemeral: what is bound now is all that can be known


def _lock(port: int) -> tuple[bool, socket.socket | None]:
    """Whether nobody else has it, and what keeps it so."""
    if not sys.platform.startswith("linux"):
        return True, None
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        lock.bind(LOCK.format(port))
    except OSError:
        lock.close()
        return False, None
    return True, lock


def _is_free(port: int) -> bool:
    """Whether it can be bound on every address. Without SO_REUSEADDR, because some frameworks do without it too: a
    port whose last connections have not quite faded is not free for them."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    if not socket.has_ipv6:
        return True
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(("::", port))
    except OSError as exc:
        return (
            exc.errno != errno.EADDRINUSE
        )  # a machine without IPv6 says something else, and nobody listens there
    return True
