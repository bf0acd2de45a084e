"""Sizes in messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.task.units import readable_size


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1000 << 20, "1000 MiB"),
        ((1 << 30) - 1, "1 GiB"),
        ((1 << 20) + 8, "1 MiB"),
        (24_064 << 20, "23.5 GiB"),
        (80 << 30, "80 GiB"),
        (2000 << 40, "2 PiB"),
        (5000 << 50, "5000 PiB"),
    ],
)
def test_a_size_in_a_message(count: int, shown: str) -> None:
    assert readable_size(count) == shown


@given(st.integers(0, 1 << 60))
def test_what_is_shown_is_close_to_the_size(count: int) -> None:
    number, unit = readable_size(count).split(" ")
    factor = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
    assert abs(float(number) * factor - count) <= 0.051 * max(count, 1)
    assert "e" not in number
