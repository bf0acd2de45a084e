"""Worlds of several roles, and of several processes in a task."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest

from support.box import Box
from support.journey import LIMIT, Journey
from support.waiting import wait

pytestmark = pytest.mark.timeout(900)

Make = Callable[..., Journey]


def test_a_chief_workers_and_a_parameter_server(journey: Make, shared: Box) -> None:
    """A lost worker makes a new world; the parameter server is not restarted."""
    job = shared.write(
        "ps.yaml",
        "run: python tf_ps.py\nframework: tensorflow\nworkers: 2\nroles: {chief: {}, ps: {}}\n",
    )
    it = journey("-f", job.name)
    it.reached(8)
    it.kill("worker-1")
    it.succeeded()
    it.every_step_once(1, adding=2)
    it.no_rank_twice(1)
    it.went_on()
    assert "job:ps" in it.text()


def test_a_lost_dask_worker_comes_back_alone(journey: Make) -> None:
    it = journey("--framework", "dask", "--workers", "2", "dask_sum.py")
    it.reached(8)
    it.kill("worker-1")
    it.succeeded()
    it.every_step_once(1, adding=2)
    assert {said.generation for said in it.said()} == {1}
    assert "with worker-0,worker-1" in it.text()


def test_several_processes_in_each_of_two_tasks(journey: Make) -> None:
    it = journey("--workers", "2", "--processes", "2", "torch_sum.py")
    it.reached(8)
    it.kill("worker-1")
    it.succeeded()
    it.every_step_once(4)
    it.no_rank_twice(4)
    it.went_on()
    assert re.search(r"\[worker-1\] \[r3\] step \d+ rank 3 of 4", it.text())


def test_lightning_goes_on_where_it_was(journey: Make) -> None:
    it = journey(
        "--workers", "2", "--",
        "sh", "-c", "exec python lit_autoencoder.py --steps 600 --checkpoints $STOKER_CHECKPOINT_DIR",
    )  # fmt: skip

    def steps() -> list[int]:
        return [int(found) for found in re.findall(r"global step (\d+) on rank 0 of 2", it.text())]

    def kept() -> set[str]:
        return {checkpoint["name"] for checkpoint in it.box.show(it.run)["checkpoints"]}

    wait(lambda: max(steps(), default=0) >= 8, limit=LIMIT)
    # last.ckpt is overwritten in place at every step, so a kill may leave a torn file.
    wait(lambda: "last.ckpt" in kept(), limit=LIMIT)
    it.kill("worker-1")
    it.succeeded()
    text = it.text()
    assert text.count("done at step 600 of 2") == 2
    seen = steps()
    again = [after for before, after in itertools.pairwise(seen) if after <= before]
    assert len(again) <= 1 and all(step > 1 for step in again), it.report()
    assert "Restoring states from the checkpoint path" in text


def test_lightning_in_two_processes_of_one_task(journey: Make) -> None:
    it = journey("--processes", "2", "lit_boring.py")
    it.succeeded()
    assert sorted(re.findall(r"\[r\d\] boring: .*", it.text())) == [
        "[r0] boring: rank 0 of 2 at step 8",
        "[r1] boring: rank 1 of 2 at step 8",
    ]


def test_fabric_in_two_tasks_of_two_processes(journey: Make) -> None:
    it = journey("--workers", "2", "--processes", "2", "lit_fabric.py")
    it.succeeded()
    said = sorted(re.findall(r"fabric: (.*)", it.text()))
    expected = [f"rank {rank} of 4, ranks [0, 1, 2, 3], same weights True" for rank in range(4)]
    # A process that aborts during its exit restarts the whole world.
    assert said == sorted(expected * (len(said) // 4)) and said, it.report()


def test_horovods_place_under_mpi(journey: Make) -> None:
    it = journey("--framework", "horovod", "--workers", "2", "--processes", "2", "horovod_place.py")
    it.succeeded()
    assert sorted(re.findall(r"rank \d of 4 on .*", it.text())) == [
        "rank 0 of 4 on worker-0: 0 4 0 2 0 2 mpi",
        "rank 1 of 4 on worker-0: 1 4 1 2 0 2 mpi",
        "rank 2 of 4 on worker-1: 2 4 0 2 1 2 mpi",
        "rank 3 of 4 on worker-1: 3 4 1 2 1 2 mpi",
    ]


def test_a_lost_dask_scheduler(journey: Make) -> None:
    """The scheduler's state is lost: the client resumes, and the workers find the new scheduler."""
    it = journey("--framework", "dask", "--workers", "2", "dask_sum.py")
    it.reached(8)
    it.kill("scheduler-0")
    it.succeeded()
    it.every_step_once(1, adding=2)
    it.went_on()
    assert "with worker-0,worker-1" in it.text()
