"""The parameter server of the examples: what each staleness guarantees, and what a loss costs.

A step sleeps for `STEP`, like a step on a GPU. So the throughput depends on the protocol, and not on the cores
of the test machine.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.examples import EXAMPLES, load

ps = load("parallel/parameter-server/parameter_server.py")
network = load("digits/network.py")
STEP = 0.01
HIDDEN = 64
Pause = Callable[[int, int], float]
"""How long a worker stalls in a step, in seconds."""


class Course:
    """Workers in threads, over real sockets; their steps and how long they took."""

    def __init__(self, workers: int, staleness: float, steps: int, *, pause: Pause = lambda *_: 0.0) -> None:
        self.staleness, self.steps, self.workers, self.pause = staleness, steps, workers, pause
        self.server = ps.Server(network.fresh(HIDDEN), [0] * workers, staleness)
        self.address = f"127.0.0.1:{self.server.begin('127.0.0.1:0')}"
        self.begun: list[tuple[int, int, int]] = []
        """Worker, its clock, and how far it was ahead of the slowest, at the beginning of every step."""
        self.seconds = [0.0] * workers
        self.failed: list[BaseException] = []

    def run(self) -> Course:
        threads = [threading.Thread(target=self._guarded, args=(n,)) for n in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not self.failed, self.failed
        assert not any(thread.is_alive() for thread in threads)
        self.server.close()
        return self

    @property
    def throughput(self) -> float:
        """Steps per second of all workers together."""
        return self.workers * self.steps / max(self.seconds)

    def weights(self) -> np.ndarray:
        found: np.ndarray = self.server.state()[0]
        return found

    def loss(self) -> float:
        (x, y), _ = network.digits()
        return float(network.gradient(self.weights(), x, y)[1]) / len(x)

    def _guarded(self, worker: int) -> None:
        try:
            self._work(worker)
        except BaseException as exc:
            self.failed.append(exc)

    def _work(self, worker: int) -> None:
        (x, y), _ = network.digits()
        client = ps.Client(self.address, worker, len(network.fresh(HIDDEN)), self.staleness)
        begun = time.monotonic()
        while not client.finish(self.steps):
            weights = client.pull()
            self.begun.append((worker, client.clock, client.gap))
            client.push(update(weights, x, y, client.clock, worker, self.workers))
            time.sleep(STEP + self.pause(worker, client.clock))
        self.seconds[worker] = time.monotonic() - begun
        client.close()


def update(weights: np.ndarray, x: np.ndarray, y: np.ndarray, clock: int, worker: int, workers: int) -> Any:
    rows = np.random.default_rng(clock).permutation(len(x))[:64]
    mine = rows[worker::workers]
    return -0.3 * network.gradient(weights, x[mine], y[mine])[0] / len(rows)


def alone(steps: int) -> np.ndarray:
    (x, y), _ = network.digits()
    weights = network.fresh(HIDDEN)
    for clock in range(steps):
        weights = weights + update(weights, x, y, clock, 0, 1)
    return weights


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_synchronous_is_what_one_worker_alone_computes(workers: int) -> None:
    course = Course(workers, 0, 30).run()
    np.testing.assert_allclose(course.weights(), alone(30), rtol=1e-9, atol=1e-12)
    assert {gap for _, _, gap in course.begun} == {0}


def test_asynchronous_workers_do_not_wait() -> None:
    slow = Course(2, math.inf, 20, pause=lambda worker, _: 4 * STEP * worker).run()
    # `finish` waits for the slow worker; until then the fast one does not.
    fast = [clock for worker, clock, _ in slow.begun if worker == 0]
    assert fast == list(range(20))
    assert slow.server.widest > 10


@pytest.mark.alone
def test_stalls_shorter_than_the_bound_delay_only_their_worker() -> None:
    """Each worker loses its own 4 steps in 100; in lockstep all would lose 16."""

    def stall(worker: int, clock: int) -> float:
        return 4 * STEP if clock == 20 * (worker + 1) else 0.0

    compare(lambda: Course(4, 6, 100).run(), lambda: Course(4, 6, 100, pause=stall).run())


@pytest.mark.alone
def test_a_network_that_stalls_for_less_than_the_bound_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While replies are late, workers continue with their weights and send the updates in one piece."""
    answered: dict[int, int] = {}
    reply = ps.Server._answer

    def late(self: Any, worker: int, *args: Any) -> bytes:
        answered[worker] = answered.get(worker, 0) + 1
        if answered[worker] % 10 == 0:
            time.sleep(3 * STEP)
        return bytes(reply(self, worker, *args))

    def stalled() -> Course:
        with monkeypatch.context() as patch:
            patch.setattr(ps.Server, "_answer", late)
            return Course(2, 5, 100).run()

    compare(lambda: Course(2, 5, 100).run(), stalled)


def compare(even: Callable[[], Course], stalled: Callable[[], Course]) -> None:
    """Three interleaved rounds, of which the best counts: other load only reduces the throughput."""
    pairs = [(even(), stalled()) for _ in range(3)]
    best = [max(each.throughput for each in side) for side in zip(*pairs, strict=True)]
    losses = [statistics.median(each.loss() for each in side) for side in zip(*pairs, strict=True)]
    print(f"throughput with stalls {best[1] / best[0]:.3f} of that without; losses {losses}")
    assert best[1] >= 0.9 * best[0]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_with_a_persistent_straggler_no_worker_is_further_ahead_than_the_bound(bound: int) -> None:
    course = Course(3, bound, 25, pause=lambda worker, _: 3 * STEP if worker == 2 else 0.0).run()
    assert max(gap for _, _, gap in course.begun) == bound
    # Between the end of a step and the start of the next, clocks may differ by one more.
    assert course.server.widest <= bound + 1
    assert sorted(clock for worker, clock, _ in course.begun if worker == 2) == list(range(25))


def test_a_restarted_worker_continues_at_its_clock_and_its_predecessor_is_refused() -> None:
    server = ps.Server(np.zeros(3), [0], 2)
    address = f"127.0.0.1:{server.begin('127.0.0.1:0')}"
    first = ps.Client(address, 0, 3, 2, generation=1)
    for _ in range(3):
        first.pull()
        first.push(np.ones(3))
    assert first.finish(3)
    second = ps.Client(address, 0, 3, 2, generation=2)
    assert second.clock == 3
    first.pull()
    first.push(np.full(3, 100.0))
    second.pull()
    second.push(np.ones(3))
    assert second.finish(4)
    first.close()
    np.testing.assert_array_equal(second.pull(), np.full(3, 4.0))
    second.close()


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_server_restored_from_its_checkpoint_repeats_the_lost_steps(staleness: int) -> None:
    server = ps.Server(np.zeros(1), [0, 0], staleness)
    port = server.begin("127.0.0.1:0")
    clients = [ps.Client(f"127.0.0.1:{port}", worker, 1, staleness) for worker in range(2)]
    done = [0, 0]

    def until(steps: int) -> None:
        def work(worker: int) -> None:
            while not clients[worker].finish(steps):
                clients[worker].pull()
                clients[worker].push(np.ones(1))
                done[worker] += 1

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, range(2), timeout=60))

    until(1)
    saved = server.state()
    until(5)
    server.close()
    again = ps.Server(*saved, staleness)
    again.begin(f"127.0.0.1:{port}")
    until(8)
    for client in clients:
        np.testing.assert_array_equal(client.pull(), [16.0])
        client.close()
    assert again.state()[1] == [8, 8]
    assert min(done) > 8, "steps 2 to 5 were done twice, and counted once"


def test_the_state_of_a_synchronous_server_has_whole_steps_only() -> None:
    server = ps.Server(np.zeros(1), [0, 0], 0)
    early = ps.Client(f"127.0.0.1:{server.begin('127.0.0.1:0')}", 0, 1, 0)
    early.pull()
    early.push(np.ones(1))
    deadline = time.monotonic() + 60
    while not server._early and time.monotonic() < deadline:
        time.sleep(0.005)
    weights, clocks = server.state()
    assert (weights.tolist(), clocks) == ([0.0], [0, 0])
    early.close()


@pytest.mark.parametrize("name", ["network.py", "ring.py"])
def test_files_of_several_examples_are_equal(name: str) -> None:
    """An example is a folder with all that it needs; the copies of a file must stay equal."""
    copies = [path.read_text() for path in Path(EXAMPLES).rglob(name)]
    assert len(copies) > 1 and len(set(copies)) == 1
