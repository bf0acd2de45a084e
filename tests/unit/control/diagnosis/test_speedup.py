"""Steps and samples per second, and the gain from more workers."""

from __future__ import annotations

import math

import pytest

from stoker.control.diagnosis.speedup import Points, Speed, compare, speed, step_seconds, useful


def every(seconds: float, values: list[float], first: int = 0) -> Points:
    return [(first + n, value, 100.0 + n * seconds) for n, value in enumerate(values)]


def test_a_pause_for_a_checkpoint_does_not_count() -> None:
    points = [(n, 1.0, 100.0 + 0.05 * n + (9.0 if n > 10 else 0.0)) for n in range(30)]
    assert step_seconds(points) == pytest.approx(0.05)
    assert step_seconds([(0, 1.0, 5.0)]) is None
    assert step_seconds([(0, 1.0, 5.0), (100, 1.0, 10.0)]) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("key", "values", "rate", "unit"),
    [
        ("samples_per_second", [800.0, 900.0, 1000.0], 900.0, "samples"),
        ("train/tokens_per_sec", [5e4, 5e4, math.nan], 5e4, "tokens"),
        ("images/s", [120.0], 120.0, "images"),
        ("throughput", [7.0, 7.0], 7.0, "throughput"),
        ("samples", [0.0, 64.0, 128.0, 192.0], 640.0, "samples"),  # in all steps
        ("samples", [64.0, 64.0, 64.0, 64.0], 640.0, "samples"),  # in every step
        ("tokens_seen", [0.0, 1e4, 2e4], 1e5, "tokens"),
    ],
)
def test_throughput_as_scripts_report_it(key: str, values: list[float], rate: float, unit: str) -> None:
    found = speed({"loss": every(0.1, [1.0] * 5), key: every(0.1, values)})
    assert found.rate == pytest.approx(rate)
    assert (found.unit, found.reporters) == (unit, 1)
    assert found.step_seconds == pytest.approx(0.1)


def test_figures_of_all_tasks_are_added_up() -> None:
    series = {f"samples_per_second{tail}": every(0.1, [800.0] * 5) for tail in ("", "@worker-1", "@worker-2")}
    found = speed(series)
    assert (found.rate, found.reporters) == (2400.0, 3)
    assert found.text() == "0.1 s per step, 2,400 samples per second (of 3 tasks together)"


def test_metrics_that_are_no_throughput() -> None:
    assert useful(["accuracy", "loss", "loss@worker-1", "sampleserror", "token_loss"]) == ["loss"]
    assert useful(["accuracy", "samples@worker-1", "samples"]) == ["samples@worker-1", "samples", "accuracy"]
    assert useful([]) == []
    assert not speed({}).known and speed({}).text() == ""


def test_efficiency_by_samples() -> None:
    many, one = Speed(0.034, 3012.0, "samples"), Speed(0.029, 886.0, "samples")
    found = compare(many, 4, one, "digits-1abc")
    assert found is not None and found.basis == "samples"
    assert found.efficiency == pytest.approx(0.85, abs=0.001)
    assert found.text == "3.40x the samples per second of one worker (digits-1abc): 85% of ideal for 4"


def test_efficiency_by_steps_names_its_assumption() -> None:
    found = compare(Speed(0.036), 4, Speed(0.03, 500.0, "tokens"), "digits-1abc")
    assert found is not None and found.basis == "steps"
    assert found.efficiency == pytest.approx(0.8333, abs=0.001)
    assert found.text.startswith(
        "83% of ideal for 4 workers, by steps: one worker alone took 0.03 s (digits-1abc)."
    )
    assert "if they share one batch of that size it is 21%" in found.text


def test_nothing_to_compare() -> None:
    assert compare(Speed(0.1), 1, Speed(0.1), "x") is None
    assert compare(Speed(None, 5.0, "samples"), 2, Speed(0.1), "x") is None
