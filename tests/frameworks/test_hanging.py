"""A hanging world is detected, the stacks of every rank are kept, and it restarts if the job asks for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.journey import Journey

pytestmark = pytest.mark.timeout(900)


def test_a_rank_that_does_not_come(journey: Callable[..., Journey]) -> None:
    it = journey("--workers", "2", "--hang-after", "10s", "--hang-then", "restart", "hang_once.py")
    it.succeeded()
    it.every_step_once(2)
    it.went_on()
    stacks = it.box("logs", it.run).stderr
    assert "out_for_lunch (hang_once.py" in stacks, "rank 1"
    assert "receive (plain_sum.py" in stacks, "the waiting rank 0"
