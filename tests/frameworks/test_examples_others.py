"""The examples in TensorFlow, JAX, MPI and Dask: two workers through Stoker, as their job files say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import worlds
from box import Box


@pytest.fixture(scope="module")
def box(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    made = Box(tmp_path_factory.mktemp("box"))
    made.env["PATH"] = f"{Path(python).parent}:{made.env['PATH']}"
    yield made
    made.close()


@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        ("tensorflow-mirrored", ["--epochs", "4"]),
        ("jax", ["--epochs", "4"]),
        ("mpi", ["--epochs", "4"]),
    ],
)
def test_synchronous_is_what_one_worker_alone_computes(
    box: Box, python: str, tmp_path: Path, example: str, arguments: list[str]
) -> None:
    """With one process each of these does the same without Stoker."""
    _, said = worlds.submitted(box, example, *arguments)
    assert "on 2 " in said
    loss, accuracy, steps = worlds.final(worlds.alone(python, example, tmp_path / "one", *arguments))
    found = worlds.final(said)
    assert found[0] == pytest.approx(loss, rel=1e-4)
    assert found[1] == pytest.approx(accuracy, abs=0.005)
    assert found[2] == steps


@pytest.mark.parametrize(
    ("example", "arguments", "steps"),
    [("tensorflow-ps", ["--epochs", "6"], 6 * 21), ("dask", ["--epochs", "6"], 6 * 48)],
)
def test_the_others_learn_too(box: Box, example: str, arguments: list[str], steps: int) -> None:
    _, said = worlds.submitted(box, example, *arguments)
    _, accuracy, done = worlds.final(said)
    assert accuracy > 0.85
    assert done == steps
