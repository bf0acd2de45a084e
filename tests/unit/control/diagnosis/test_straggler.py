"""Which task delays the others, from figures of real runs."""

from __future__ import annotations

import pytest

from stoker.control.diagnosis.straggler import Signs, StragglerFinding, straggler


def found(*tasks: Signs) -> StragglerFinding:
    said = straggler(tasks)
    assert said is not None
    return said


def test_synchronous_ranks_are_compared_by_their_own_work() -> None:
    """All report the same steps, because all wait; one computes 1.8 times as long."""
    computes = (0.101, 0.099, 0.182, 0.103)
    said = found(
        *(Signs(f"worker-{n}", compute=own, step_seconds=0.19, step=400) for n, own in enumerate(computes))
    )
    assert (said.task, said.times, said.source) == ("worker-2", 1.8, "compute")
    assert said.text == "worker-2 is 1.8x slower than the others' median (from the compute time it reports)"


def test_equal_work_names_no_straggler_and_the_source() -> None:
    said = found(*(Signs(f"worker-{n}", compute=0.1 + n / 200, cpu=0.2 + n) for n in range(4)))
    assert said.task is None
    assert said.text.startswith("none: no task is more than 1.1")


def test_two_workers_are_compared_with_each_other() -> None:
    """The median of both would hide half of the difference."""
    said = found(Signs("worker-0", compute=0.10), Signs("worker-1", compute=0.18))
    assert (said.task, said.times) == ("worker-1", 1.8)


def test_asynchronous_ranks_are_compared_by_step_time() -> None:
    said = found(
        Signs("worker-0", step_seconds=0.050, step=900),
        Signs("worker-1", step_seconds=0.052, step=880),
        Signs("worker-2", step_seconds=0.103, step=440),
    )
    assert (said.task, said.source) == ("worker-2", "steps")
    assert said.text == "worker-2 is 2.0x slower than the others' median (from reported steps)"


def test_a_worker_far_behind_with_the_same_step_time() -> None:
    said = found(*(Signs(f"worker-{n}", step_seconds=0.05, step=at) for n, at in enumerate((1000, 990, 640))))
    assert said.text == "worker-2 is 355 steps behind the others' median of 995 (from reported steps)"


def test_with_equal_steps_the_cpu_use_decides() -> None:
    """gloo sleeps while it waits: the busy task is the straggler."""
    said = found(
        *(
            Signs(f"worker-{n}", step_seconds=0.2, step=300 + n, cpu=cpu)
            for n, cpu in enumerate((0.54, 0.97, 0.55, 0.52))
        )
    )
    assert (said.task, said.times, said.source) == ("worker-1", 1.8, "cpu")
    assert "it uses 0.97 CPUs while the others use 0.54 and seem to wait" in said.text
    assert "crowd out" in said.text


def test_gpus_that_are_all_busy_give_no_answer() -> None:
    said = found(*(Signs(f"worker-{n}", gpu=99.0 + n / 4, cpu=1.0 + n) for n in range(4)))
    assert said.task is None
    assert said.text.startswith("cannot be determined: every GPU is busy all the time")


def test_the_gpu_that_idles_while_the_others_spin_waits_for_its_data() -> None:
    said = found(
        *(Signs(f"worker-{n}", gpu=use, cpu=1.0) for n, use in enumerate((100.0, 99.0, 58.0, 100.0)))
    )
    assert (said.task, said.source) == ("worker-2", "gpu")
    assert "58% busy while the others' are at 100%" in said.text and "wait in NCCL" in said.text


def test_the_gpu_that_is_busy_while_the_others_idle() -> None:
    said = found(*(Signs(f"worker-{n}", gpu=use) for n, use in enumerate((40.0, 42.0, 91.0))))
    assert (said.task, said.source) == ("worker-2", "gpu")
    assert said.text.startswith("probably worker-2")


def test_output_is_the_last_source() -> None:
    said = found(*(Signs(f"worker-{n}", cpu=0.5, quiet=quiet) for n, quiet in enumerate((1.0, 2.0, 95.0))))
    assert said.text == "perhaps worker-2: it last printed 95 s ago, the others 2 s ago (from their output)"


@pytest.mark.parametrize(
    "tasks",
    [
        (),
        (Signs("worker-0", compute=1.0),),
        (Signs("worker-0"), Signs("worker-1")),
        # Only rank 0 reports, as in most scripts: there is nothing to compare it with.
        (Signs("worker-0", step_seconds=0.1, step=10), Signs("worker-1")),
        # Idle tasks differ by noise.
        (Signs("worker-0", cpu=0.01), Signs("worker-1", cpu=0.04)),
        # Just started: two steps apart is no straggler.
        (Signs("worker-0", step=3), Signs("worker-1", step=2)),
        (Signs("worker-0", cpu=0.5, quiet=400.0), Signs("worker-1", cpu=0.5, quiet=410.0)),
    ],
)
def test_no_straggler(tasks: tuple[Signs, ...]) -> None:
    assert straggler(tasks) is None
