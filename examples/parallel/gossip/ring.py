"""A ring all-reduce over TCP: workers sum their gradients without a central process.

Each worker sends only to the one on its right and receives only from the one on its left. The vector is cut
into as many chunks as there are workers. In the first round (reduce-scatter) every chunk travels once
around the ring, and each worker adds its own numbers to it. Then each worker holds one finished chunk. In
the second round (all-gather) the finished chunks travel around once more. Each worker sends 2 (n - 1) / n
of the vector, for any number of workers, so NCCL and Horovod use the ring for large vectors. All end with
the same bytes, so replicas do not drift apart.
"""

import os
import select
import socket
import struct
import time

import numpy as np

HELLO = struct.Struct("!4sIII")
PATIENCE = 60.0
"""Seconds to wait for a neighbour that is still starting, or that is silent."""


class Ring:
    """The place of one worker in a ring. `peers`: host:port of every worker, in the order of their ranks."""

    def __init__(self, rank: int, peers: list[str], generation: int = 0) -> None:
        self.rank, self.size = rank, len(peers)
        self._generation = generation
        if self.size == 1:
            return
        here = place(peers[rank])
        family = socket.AF_INET6 if ":" in here[0] else socket.AF_INET
        with socket.create_server(here, family=family) as listener:
            self.right = self._connect(peers[(rank + 1) % self.size])
            self.left = self._accept(listener)
        for side in (self.left, self.right):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            side.setblocking(False)

    def all_reduce(self, vector: np.ndarray) -> np.ndarray:
        """The sum of all workers' vectors. All workers must call it, with vectors of one length and type."""
        total = np.array(vector)
        if self.size == 1:
            return total
        chunks = np.array_split(total, self.size)  # views: what is written to a chunk is in the total
        for step in range(self.size - 1):
            mine = chunks[(self.rank - step) % self.size]
            theirs = chunks[(self.rank - step - 1) % self.size]
            theirs += exchange(mine, self.right, np.empty_like(theirs), self.left)
        for step in range(self.size - 1):
            done = chunks[(self.rank - step + 1) % self.size]
            exchange(done, self.right, chunks[(self.rank - step) % self.size], self.left)
        return total

    def close(self) -> None:
        if self.size > 1:
            self.left.close()
            self.right.close()

    def _connect(self, peer: str) -> socket.socket:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                right = socket.create_connection(place(peer), timeout=PATIENCE)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        right.sendall(HELLO.pack(b"ring", self._generation, self.rank, self.size))
        return right

    def _accept(self, listener: socket.socket) -> socket.socket:
        """Only the left neighbour of this generation: a worker of an earlier world is rejected."""
        expected = HELLO.pack(b"ring", self._generation, (self.rank - 1) % self.size, self.size)
        listener.settimeout(PATIENCE)
        while True:
            left, _ = listener.accept()
            left.settimeout(PATIENCE)
            if left.recv(HELLO.size, socket.MSG_WAITALL) == expected:
                return left
            left.close()


def exchange(give: np.ndarray, to: socket.socket, take: np.ndarray, origin: socket.socket) -> np.ndarray:
    """Send one array while receiving another, and return that. One after the other would deadlock,
    because every worker would wait for a neighbour that waits as well."""
    outgoing, incoming = memoryview(give).cast("B"), memoryview(take).cast("B")
    while outgoing or incoming:
        readable, writable, _ = select.select(
            [origin] if incoming else [], [to] if outgoing else [], [], PATIENCE
        )
        if not readable and not writable:
            raise TimeoutError(f"a neighbour was silent for {PATIENCE:.0f} s")
        if writable:
            outgoing = outgoing[to.send(outgoing) :]
        if readable:
            received = origin.recv_into(incoming)
            if not received:
                raise ConnectionError("a neighbour has gone")
            incoming = incoming[received:]
    return take


def place(peer: str) -> tuple[str, int]:
    """`10.0.0.7:9000` or `[fd00::7]:9000`, in two parts."""
    host, port = peer.rsplit(":", 1)
    return host.strip("[]"), int(port)


def from_environment() -> Ring:
    """The ring of this run's workers; a ring of one outside Stoker."""
    peers = os.environ.get("STOKER_PEERS", "localhost:0").split(",")
    rank = int(os.environ.get("STOKER_RANK", "0"))
    return Ring(rank, peers, int(os.environ.get("STOKER_GENERATION", "0")))
