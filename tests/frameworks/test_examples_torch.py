"""The torch examples on two workers, then on three from that checkpoint, give the result of one worker."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from support.box import Box
from support.frameworks import worlds

RING_AND_GLOO = """
import os, sys
sys.path.insert(0, sys.argv[1])
import numpy as np, ring, torch, torch.distributed as dist
here = ring.from_environment()
dist.init_process_group("gloo")
for length in (1, 5, 1000, 200_001):
    vector = np.random.default_rng(here.rank + length).normal(size=length)
    theirs = torch.from_numpy(vector.copy())
    dist.all_reduce(theirs)
    np.testing.assert_allclose(here.all_reduce(vector), theirs.numpy(), rtol=1e-12, atol=1e-12)
print("ring and gloo agree")
dist.destroy_process_group()
here.close()
"""


@pytest.mark.parametrize(
    ("example", "few", "more"),
    [
        ("ddp", ["--epochs", "2", "--batch", "48"], ["--epochs", "3", "--batch", "48"]),
        ("fsdp", ["--epochs", "2", "--batch", "48"], ["--epochs", "3", "--batch", "48"]),
        ("tensor-parallel", ["--steps", "40"], ["--steps", "60"]),
        ("pipeline", ["--epochs", "2"], ["--epochs", "3"]),
    ],
)
def test_the_result_of_one_worker_on_two_and_on_from_there_on_three(
    shared: Box, python: str, tmp_path: Path, example: str, few: list[str], more: list[str]
) -> None:
    run, _ = worlds.submitted(shared, example, *few)
    left = worlds.checkpoint(shared, run, tmp_path / "pulled")
    three = worlds.by_hand(python, example, tmp_path / "three", worlds.torch_world(3), *more, resume=left)
    assert three.count("going on after") == 3
    loss, accuracy, steps = worlds.final(worlds.alone(python, example, tmp_path / "one", *more))
    # Adam divides by the size of the gradient, which amplifies rounding errors.
    found = worlds.final(three)
    assert found[0] == pytest.approx(loss, rel=5e-3 if example == "fsdp" else 1e-4)
    assert found[1] == pytest.approx(accuracy, abs=0.005)
    assert found[2] == steps


@pytest.mark.parametrize(("example", "epochs"), [("fsdp", "40"), ("pipeline", "100")])
def test_a_model_in_parts_loses_one_and_goes_on(
    shared: Box, python: str, tmp_path: Path, example: str, epochs: str
) -> None:
    """The parts of all workers' checkpoints are assembled."""
    said = worlds.survived(shared, example, "worker-1", "--epochs", epochs, kept=True)
    assert said.count("going on after") == 2, said
    loss, accuracy, steps = worlds.final(worlds.alone(python, example, tmp_path / "one", "--epochs", epochs))
    found = worlds.final(said)
    assert found[0] == pytest.approx(loss, rel=0.05, abs=1e-4)
    assert found[1] == pytest.approx(accuracy, abs=0.01)
    assert found[2] == steps


def test_our_ring_agrees_with_gloo(python: str, tmp_path: Path) -> None:
    members = worlds.torch_world(3)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in members]
    peers = ",".join(f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners)
    for listener in listeners:
        listener.close()
    digits = str(worlds.ROOT / "examples" / "digits")
    started = [
        subprocess.Popen(
            [python, "-c", RING_AND_GLOO, digits],
            env={
                **member,
                "STOKER_RANK": member["RANK"],
                "STOKER_PEERS": peers,
                "OMP_NUM_THREADS": "1",
                "TMPDIR": os.environ["TMPDIR"],
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for member in members
    ]
    said = [process.communicate(timeout=240)[0] for process in started]
    assert all("ring and gloo agree" in one for one in said), said
