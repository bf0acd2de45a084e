"""Ports for tasks that share this machine's address: no two tasks are given the same one.

`PortAllocator.take(n)`, `PortAllocator.give(ports)`, and after a restart of the server `PortAllocator.adopt(ports)`.

A task starts to listen long after its port was chosen, so a port that is free now is not enough:

- The kernel assigns local ports of outgoing connections from its ephemeral range at any moment. Ports are chosen
  outside it.
- Several homes may run on one machine. Each port is locked by an abstract Unix socket named after its number. All
  processes of this network namespace see it, whatever their user. It ends with its process and leaves no file.
- Other programs do not know these locks. So a port is also bound for a moment before it is allocated.

Without abstract sockets (macOS) only the last check remains, and two homes may in rare cases choose the same port.
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
"""Below it are the well-known services of a machine."""
HIGHEST = 30_000
"""From here on Kubernetes forwards the node ports of its services, if the machine is a node of a cluster."""
ENOUGH = 1_000
"""A range with fewer ports than this is too small; the next one is tried."""
EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"
LOCK = "\0stoker-port-{}"


class PortAllocator:
    """The ports of this server's tasks. Any thread may call it.

    A port stays locked until it is given back or this process ends. A new process calls `adopt` with the ports in its
    records. Ports that were given back are the last to be taken again: peers may still try to connect to them.
    """

    def __init__(self, choice: range | None = None) -> None:
        self._choice = choice or usable(read_text(EPHEMERAL))
        # A random start: homes that start together do not compete for the same ports.
        self._next = random.randrange(len(self._choice))
        self._held: dict[int, socket.socket | None] = {}
        self._mutex = threading.Lock()

    def take(self, count: int) -> tuple[int, ...]:
        """Lock `count` free ports; all or an error."""
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
        """Lock the ports of tasks that already run. Returns those that another process has locked meanwhile: the
        task keeps them while it lives, and its next generation needs others."""
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
        """Unlock these ports. Unknown ones are ignored."""
        with self._mutex:
            self._drop(ports)

    def close(self) -> None:
        self.give(list(self._held))

    @property
    def taken(self) -> frozenset[int]:
        return frozenset(self._held)

    def _round(self) -> Iterator[int]:
        """Each port once, starting where the last round ended."""
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
    """The ports to choose from, given the kernel's ephemeral range as text (`32768\\t60999`; empty: not known)."""
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
    return range(LOWEST, HIGHEST)  # all ports are ephemeral: only the bind check is left


def _lock(port: int) -> tuple[bool, socket.socket | None]:
    """Whether no other process has the port, and the socket that locks it."""
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
    """Whether it can be bound on every address. Without SO_REUSEADDR, because some frameworks do not set it: for
    them a port with a connection in TIME_WAIT is not free."""
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
        # A machine without IPv6 reports another error; then nothing listens on it.
        return exc.errno != errno.EADDRINUSE
    return True
