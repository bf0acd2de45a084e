"""The examples in TensorFlow, JAX, MPI and Dask, as Stoker runs with two workers from their job files."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.box import Box
from support.frameworks import worlds


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        ("tensorflow-mirrored", ["--epochs", "4"]),
        ("jax", ["--epochs", "4"]),
        ("mpi", ["--epochs", "4"]),
    ],
)
def test_synchronous_is_what_one_worker_alone_computes(
    shared: Box, python: str, tmp_path: Path, example: str, arguments: list[str]
) -> None:
    """With one process each of these computes the same without Stoker."""
    _, said = worlds.submitted(shared, example, *arguments)
    assert "on 2 " in said
    loss, accuracy, steps = worlds.final(worlds.alone(python, example, tmp_path / "one", *arguments))
    found = worlds.final(said)
    assert found[0] == pytest.approx(loss, rel=1e-4)
    assert found[1] == pytest.approx(accuracy, abs=0.005)
    assert found[2] == steps


@pytest.mark.parametrize(("example", "epoch"), [("tensorflow-ps", 21), ("dask", 48)])
def test_a_worker_comes_back_alone_and_the_training_goes_on(shared: Box, example: str, epoch: int) -> None:
    said = worlds.survived(shared, example, "worker-1", "--epochs", "25")
    _, accuracy, steps = worlds.final(said)
    assert accuracy > 0.9
    assert steps == 25 * epoch
    assert "going on after" not in said, "the chief, or the client, was never stopped"
