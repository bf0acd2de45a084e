"""The state in memory of a run and its tasks."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.control.policy.task_phases import TaskPhase
from stoker.control.state import LiveTask
from stoker.frameworks.roles import parts_of
from stoker.spec import Job


@pytest.mark.parametrize(
    ("known", "excused"),
    [
        ({}, False),
        ({"stop_sent": "stop"}, True),
        ({"stop_sent": "stop", "gone": "its pod was deleted"}, False),
        ({"stop_sent": "stop", "phase": TaskPhase.CLOSING}, False),
        ({"stop_sent": "stop", "gone": "its pod has ended", "forced": True}, True),
        ({"stop_sent": "stop", "phase": TaskPhase.CLOSING, "forced": True}, True),
        ({"stop_sent": "stop", "gone": "no word from node n1", "given_up": True, "forced": True}, False),
        ({"gone": "its pod was deleted"}, False),
    ],
)
def test_who_was_told_to_stop_and_was_lost_is_lost(known: dict[str, Any], excused: bool) -> None:
    """Otherwise the run would fail by the broken connections of the members that noticed the loss first."""
    [part] = parts_of(Job.from_json({"name": "digits", "run": "train", "workers": 2}))
    assert LiveTask("worker-1", part, 1, **known).excused is excused
