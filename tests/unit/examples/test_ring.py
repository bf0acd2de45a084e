"""The ring of the digits example: right sums, equal bytes on all workers, and the result of one worker
alone."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from support.examples import load

ring = load("digits/ring.py")
network = load("digits/network.py")
train = load("digits/train.py")


def around(size: int, work: Callable[[Any], Any]) -> list[Any]:
    """The results of all workers of a ring."""
    peers = free(size)

    def one(rank: int) -> Any:
        here = ring.Ring(rank, peers, generation=7)
        try:
            return work(here)
        finally:
            here.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size), timeout=60))


def free(count: int) -> list[str]:
    doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [f"127.0.0.1:{door.getsockname()[1]}" for door in doors]
    for door in doors:
        door.close()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 7, 300_001])
def test_all_workers_have_the_sum_in_equal_bytes(size: int, length: int) -> None:
    """Also for vectors shorter than the ring, and longer than any socket buffer."""
    vectors = [np.random.default_rng(rank).normal(size=length) for rank in range(size)]
    sums = around(size, lambda here: here.all_reduce(vectors[here.rank]))
    np.testing.assert_allclose(sums[0], np.sum(vectors, axis=0), rtol=1e-9, atol=1e-12)
    assert len({one.tobytes() for one in sums}) == 1


@pytest.mark.parametrize("size", [2, 3])
def test_several_workers_train_like_one(size: int) -> None:
    data, _ = network.digits()

    def epoch(here: Any) -> tuple[np.ndarray, float]:
        weights = network.fresh(32)
        loss = train.train_epoch(here, weights, data, 16, 0.15, np.random.default_rng(0))
        return weights, loss

    alone, loss = epoch(ring.Ring(0, ["localhost:0"]))
    for weights, mean in around(size, epoch):
        np.testing.assert_allclose(weights, alone, rtol=1e-6, atol=1e-9)
        assert mean == pytest.approx(loss)


def test_a_worker_of_an_earlier_world_is_refused() -> None:
    peers = free(2)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(ring.Ring, 0, peers, 2)
        host, port = ring.place(peers[0])
        ghost = None
        while ghost is None:
            try:
                ghost = socket.create_connection((host, port), timeout=60)
            except ConnectionRefusedError:
                continue
        ghost.sendall(ring.HELLO.pack(b"ring", 1, 1, 2))
        second = pool.submit(ring.Ring, 1, peers, 2)
        here, there = first.result(60), second.result(60)
        assert ghost.recv(1) == b""
    ghost.close()
    here.close()
    there.close()


def test_a_neighbour_that_dies_is_noticed() -> None:
    def work(here: Any) -> str:
        if here.rank == 1:
            return "died"
        with pytest.raises(ConnectionError):
            here.all_reduce(np.ones(1000))
            here.all_reduce(np.ones(1000))
        return "noticed"

    assert around(3, work) == ["noticed", "died", "noticed"]


def test_addresses_of_both_kinds() -> None:
    assert ring.place("10.0.0.7:9000") == ("10.0.0.7", 9000)
    assert ring.place("[fd00::7]:9000") == ("fd00::7", 9000)
