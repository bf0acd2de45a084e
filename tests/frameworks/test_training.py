"""Each framework trains on two workers and loses one in the middle; every step is done exactly once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.journey import Journey

pytestmark = pytest.mark.timeout(900)

Make = Callable[..., Journey]

TWO = ("--workers", "2")
WORLDS = {
    "plain": (*TWO, "--framework", "none", "plain_sum.py"),
    "torch": (*TWO, "torch_sum.py"),
    "torchrun": (*TWO, "--framework", "torch", "--", "sh", "torchrun.sh"),
    "torchrun-called": (*TWO, "--", "torchrun", "torch_sum.py"),
    "accelerate": (*TWO, "--", "accelerate", "launch", "accelerate_sum.py"),
    "tensorflow": (*TWO, "tf_mirrored.py"),
    "jax": (*TWO, "jax_sum.py"),
    "mpi": (*TWO, "mpi_sum.py"),
    "mpi-called": (*TWO, "--", "mpirun", "-np", "2", "python", "mpi_sum.py"),
}


@pytest.mark.parametrize("name", WORLDS)
def test_a_lost_worker(name: str, journey: Make) -> None:
    it = journey(*WORLDS[name])
    it.reached(8)
    it.kill("worker-1")
    it.succeeded()
    it.every_step_once(2)
    it.no_rank_twice(2)
    it.went_on()
