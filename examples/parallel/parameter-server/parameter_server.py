"""A parameter server with bounded staleness, over TCP.

The server keeps the parameters, one vector, and adds to it what the workers send. Each worker counts its steps: that
is its clock. A worker may begin step c once every worker has finished c - s steps, where s is the staleness:

    s = 0     synchronous: all begin a step with the same parameters, and the result is that of one worker
    s = inf   asynchronous: no worker waits for another
    between   a worker that stalls for less than s steps holds up no other; one that is always slow sets the pace,
              and none is ever more than s steps ahead of it

Sending and receiving go on in the background while the worker computes with what it has, as long as that is fresh
enough; so the network, too, may stall for s steps.

Workers hold nothing that cannot be had again: one that comes back asks the server for its clock. A server that comes
back from its checkpoint tells the workers the clocks it knows, and they go back to them. So no step is lost, and none
is counted twice.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time

import numpy as np

HELLO = struct.Struct("!II")
"""Worker and generation: what a worker says first."""
REQUEST = struct.Struct("!dd")
"""The clock that the update after it brings the worker to (not a number: no update follows), and the clock that the
slowest must have reached before there is a reply."""
REPLY = struct.Struct("!II")
"""The worker's clock and that of the slowest. The parameters follow."""
PATIENCE = 120.0
"""Seconds that a server may be away before its workers give up."""


class Server:
    """Holds the parameters and the clocks. `state` may be called at any time, from any thread."""

    def __init__(self, parameters: np.ndarray, clocks: list[int], staleness: float) -> None:
        self._parameters = np.array(parameters, float)
        self._clocks = list(clocks)
        self._staleness = staleness
        self._early: dict[int, np.ndarray] = {}
        """Synchronous: updates of the incomplete step, by worker."""
        self._generations = [0] * len(clocks)
        self._moved = threading.Condition()
        self._sockets: list[socket.socket] = []
        self._closed = False
        self.widest = 0
        """The largest difference so far between the clocks of two workers."""

    def begin(self, address: str) -> int:
        """Serve in the background; returns the port."""
        here = place(address)
        listener = socket.create_server(here, family=socket.AF_INET6 if ":" in here[0] else socket.AF_INET)
        self._sockets.append(listener)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return int(listener.getsockname()[1])

    def close(self) -> None:
        with self._moved:
            self._closed = True
            for each in self._sockets:
                _end(each)

    def state(self) -> tuple[np.ndarray, list[int]]:
        """The parameters, and how many steps of each worker are in them."""
        with self._moved:
            clocks = [clock - (worker in self._early) for worker, clock in enumerate(self._clocks)]
            return self._parameters.copy(), clocks

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                there, _ = listener.accept()
            except OSError:
                return  # The server was closed.
            with self._moved:
                if self._closed:
                    there.close()
                    return
                self._sockets.append(there)
            threading.Thread(target=self._serve, args=(there,), daemon=True).start()

    def _serve(self, there: socket.socket) -> None:
        with there:
            try:
                there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                worker, generation = HELLO.unpack(_receive(there, HELLO.size))
                while True:
                    clock, need = REQUEST.unpack(_receive(there, REQUEST.size))
                    if not math.isnan(clock):
                        update = np.frombuffer(_receive(there, self._parameters.nbytes))
                        self._take(worker, generation, int(clock), update)
                    there.sendall(self._answer(worker, generation, need))
            except OSError:
                return  # The worker has gone. If it is restarted, it connects again.

    def _take(self, worker: int, generation: int, clock: int, update: np.ndarray) -> None:
        with self._moved:
            self._fence(worker, generation)
            if clock <= self._clocks[worker]:
                return  # The update was already received; only the reply was lost.
            if self._staleness == 0:
                self._early[worker] = update
            else:
                self._parameters += update
            self._clocks[worker] = clock
            self.widest = max(self.widest, max(self._clocks) - min(self._clocks))
            if len(self._early) == len(self._clocks):
                self._parameters += sum(self._early[each] for each in range(len(self._clocks)))
                self._early.clear()
            self._moved.notify_all()

    def _answer(self, worker: int, generation: int, need: float) -> bytes:
        with self._moved:
            self._fence(worker, generation)
            self._moved.wait_for(lambda: min(self._clocks) >= need)
            return REPLY.pack(self._clocks[worker], min(self._clocks)) + self._parameters.tobytes()

    def _fence(self, worker: int, generation: int) -> None:
        """A worker that was replaced and resumes late is rejected."""
        if generation < self._generations[worker]:
            raise ConnectionError(f"worker {worker} of generation {generation} was replaced")
        self._generations[worker] = generation


class Client:
    """A worker's end of it, for one thread.

    while client.clock < steps:
        parameters = client.pull()
        client.push(update)
    """

    def __init__(self, address: str, worker: int, size: int, staleness: float, generation: int = 0) -> None:
        self.clock = 0
        """How many steps this worker has finished. Smaller than before where the server fell back to a checkpoint."""
        self._address, self._size, self._staleness = address, size, staleness
        self._hello = HELLO.pack(worker, generation)
        self._pending: list[np.ndarray] = []
        """The updates of the last steps, which the server has not confirmed yet."""
        self._pulled = -1
        self._slowest, self._need = 0, -math.inf
        self._parameters = np.zeros(size)
        self._moved = threading.Condition()
        self._broken: OSError | None = None
        self._closed = False
        self._connect()
        threading.Thread(target=self._talk, daemon=True).start()

    @property
    def gap(self) -> int:
        """How many steps this worker is ahead of the slowest, as far as it knows; never too low."""
        return self.clock - self._slowest

    def pull(self) -> np.ndarray:
        """Parameters that are as fresh as the bound asks for, with all of this worker's own updates in them."""
        with self._moved:
            self._moved.wait_for(lambda: self._broken or self._reached(self.clock - self._staleness))
            if self._broken:
                raise self._broken
            self._pulled = self.clock
            return self._parameters + sum(self._pending)

    def push(self, update: np.ndarray) -> None:
        """The change of the parameters since `pull`. Returns at once: it is sent in the background."""
        with self._moved:
            if self._pulled != self.clock:
                return  # The server fell back to an earlier clock meanwhile: this step is done again.
            self._pending.append(update)
            self.clock += 1
            self._moved.notify_all()

    def finish(self, steps: int) -> bool:
        """Wait until every worker has finished so many steps. False: the server fell back, go on."""
        with self._moved:
            self._moved.wait_for(lambda: self._broken or self.clock < steps or self._reached(steps))
            if self._broken:
                raise self._broken
            return self.clock >= steps

    def close(self) -> None:
        with self._moved:
            self._closed = True
            self._moved.notify_all()
            _end(self._there)

    def _reached(self, need: float) -> bool:
        if self._slowest < need and self._need != need:
            self._need = need
            self._moved.notify_all()
        return self._slowest >= need

    def _talk(self) -> None:
        """Runs in the background: sends updates, fetches fresh parameters, and reconnects."""
        while not self._closed:
            try:
                self._carry()
            except OSError as lost:
                self._there.close()
                try:
                    if not self._closed:
                        self._connect()
                except OSError:
                    with self._moved:
                        self._broken = lost
                        self._moved.notify_all()
                    return

    def _carry(self) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self._closed or self._pending or self._slowest < self._need)
            sent = len(self._pending)
            update = sum(self._pending, np.zeros(self._size)).tobytes() if sent else b""
            need = max(self.clock - self._staleness, self._need)
            request = REQUEST.pack(self.clock if sent else math.nan, need) + update
        self._there.sendall(request)
        _, slowest, parameters = self._reply()
        with self._moved:
            del self._pending[:sent]
            self._parameters, self._slowest = parameters, slowest
            self._moved.notify_all()

    def _connect(self) -> None:
        """Find the server, also while it is still starting, and continue from the clock that it knows."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                clock, slowest, parameters = self._greet()
                break
            except OSError:
                if self._closed or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        with self._moved:
            confirmed = self.clock - len(self._pending)
            if confirmed <= clock <= self.clock:
                del self._pending[: clock - confirmed]
            else:
                self._pending, self.clock = [], clock
            self._parameters, self._slowest, self._need = parameters, slowest, -math.inf
            self._moved.notify_all()

    def _greet(self) -> tuple[int, int, np.ndarray]:
        there = socket.create_connection(place(self._address), timeout=PATIENCE)
        with self._moved:
            if self._closed:
                there.close()
                raise ConnectionError("this client was closed")
            self._there = there
        try:
            there.settimeout(None)  # A reply may take as long as the slowest worker does.
            there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            there.sendall(self._hello + REQUEST.pack(math.nan, -math.inf))
            return self._reply()
        except OSError:
            there.close()
            raise

    def _reply(self) -> tuple[int, int, np.ndarray]:
        clock, slowest = REPLY.unpack(_receive(self._there, REPLY.size))
        return clock, slowest, np.frombuffer(_receive(self._there, 8 * self._size))


def place(address: str) -> tuple[str, int]:
    """`10.0.0.7:9000` or `[fd00::7]:9000`, in two parts."""
    host, port = address.rsplit(":", 1)
    return host.strip("[]"), int(port)


def _end(there: socket.socket) -> None:
    """Shut the connection down; this also wakes a thread that waits for data from it."""
    with contextlib.suppress(OSError):
        there.shutdown(socket.SHUT_RDWR)
    there.close()


def _receive(there: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = there.recv_into(view)
        if not count:
            raise ConnectionError("the other side has gone")
        view = view[count:]
    return bytes(data)
