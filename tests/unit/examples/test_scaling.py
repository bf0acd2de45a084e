"""The table of the scaling benchmark."""

from __future__ import annotations

from support.examples import load

scaling = load("scaling/scaling.py")


def test_by_samples_where_they_are_reported() -> None:
    one = scaling.compare({"step_seconds": 0.1, "rate": 1000.0, "unit": "samples"}, 1, None)
    two = scaling.compare({"step_seconds": 0.06, "rate": 1600.0, "unit": "samples"}, 2, one)
    assert (two["speedup"], two["efficiency"]) == (1.6, 0.8)
    assert scaling.table([one, two]).splitlines() == [
        "workers       step     samples/s  speed-up  efficiency",
        "      1    0.100 s       1,000.0      1.00        1.00",
        "      2    0.060 s       1,600.0      1.60        0.80",
    ]


def test_by_steps_where_they_are_not() -> None:
    one = scaling.compare({"step_seconds": 0.1, "rate": None, "unit": None}, 1, None)
    four = scaling.compare({"step_seconds": 0.125, "rate": None, "unit": None}, 4, one)
    assert (four["speedup"], four["efficiency"]) == (3.2, 0.8)
    assert (
        scaling.table([one, four]).splitlines()[-1]
        == "      4    0.125 s           8.0      3.20        0.80"
    )
