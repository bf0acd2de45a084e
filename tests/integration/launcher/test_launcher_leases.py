"""The lease of a real launcher: renewed by contact, expired by silence, kept over a stop of the launcher."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from stoker.task import formats, layout

Make = Callable[..., Any]
FOREVER = "trap 'exit 5' TERM; echo up; while :; do sleep 0.05; done"

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")


def contact(it: Any, number: int) -> None:
    """Record a contact as the courier does."""
    formats.write_json(str(it.root / layout.CONTACT), {"count": number})


@pytest.mark.parametrize("mode", ["direct"], indirect=True)
def test_contact_keeps_a_task_and_silence_ends_it(mode: Any, task: Make) -> None:
    it = task(lease=3.0)
    launched = mode.start(it)
    it.sh(FOREVER, grace=30)
    it.said("up")
    until = time.monotonic() + 4.5
    number = 0
    while time.monotonic() < until:
        contact(it, number := number + 1)
        time.sleep(0.1)
    assert it.journal("ended") == []
    ending = it.ending()
    assert (ending.kind, ending.code) == ("stopped", 5) and "lease of 3 s" in ending.message
    launched.gone()
    assert launched.process.returncode == 0
    it.nothing_left()


@pytest.mark.parametrize("mode", ["direct"], indirect=True)
def test_one_that_was_stopped_for_longer_than_its_lease_is_found_again(mode: Any, task: Make) -> None:
    it = task(lease=3.0)
    launched = mode.start(it)
    it.sh(FOREVER, grace=30)
    it.said("up")
    launched.kill(signal.SIGSTOP)
    time.sleep(4.0)
    launched.kill(signal.SIGCONT)
    woke = time.monotonic()
    number = 0
    while time.monotonic() < woke + 4.5:
        contact(it, number := number + 1)
        time.sleep(0.1)
    assert it.journal("ended") == []
    assert it.ending().kind == "stopped"


@pytest.mark.parametrize("mode", ["direct"], indirect=True)
def test_an_exclusive_one_is_not_waited_for(mode: Any, task: Make) -> None:
    it = task(lease=3.0, exclusive=True)
    launched = mode.start(it)
    it.sh(FOREVER, grace=30)
    it.said("up")
    launched.kill(signal.SIGSTOP)
    time.sleep(4.0)
    contact(it, 1)
    launched.kill(signal.SIGCONT)
    ending = it.ending()
    assert ending.kind == "stopped" and "lease" in ending.message


@pytest.mark.parametrize("mode", ["direct"], indirect=True)
def test_a_task_that_only_holds_ends_with_its_lease(mode: Any, task: Make) -> None:
    it = task(lease=1.0)
    launched = mode.start(it)
    it.sh("exit 7")
    assert it.ending().code == 7
    launched.gone()
    assert [entry["kind"] for entry in it.journal("ended")] == ["exit"]
