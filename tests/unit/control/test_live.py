"""What is known of a run and its tasks while they live."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.control.state import LiveTask
from stoker.frameworks.roles import parts_of
from stoker.spec import Job


@pytest.mark.parametrize(
    ("known", "excused"),
    [
        ({}, False),
        ({"told": True}, True),
        ({"told": True, "gone": "its pod was deleted"}, False),
        ({"told": True, "outside": True}, False),
        ({"told": True, "gone": "its pod has ended", "forced": True}, True),
        ({"told": True, "outside": True, "forced": True}, True),
        ({"told": True, "gone": "no word from node n1", "given_up": True, "forced": True}, False),
        ({"gone": "its pod was deleted"}, False),
    ],
)
def test_who_was_told_to_stop_and_was_lost_is_lost(known: dict[str, Any], excused: bool) -> None:
    """Otherwise the run would fail for those who noticed the loss first: by their broken connections."""
    [part] = parts_of(Job.from_json({"name": "digits", "run": "train", "workers": 2}))
    assert LiveTask("worker-1", part, 1, **known).excused is excused
