"""Work that can wait takes what the machine has to spare, and little where it has nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stoker.task import spare
from stoker.task.spare import Spare


class Machine:
    """Time passes only while somebody works or sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, idle: float) -> None:
        self.now = 100.0
        self.worked = 0.0
        self.idle = idle
        """CPUs that have nothing to do while we do nothing."""
        self.counted = 0.0
        monkeypatch.setattr(spare, "time", self)
        monkeypatch.setattr(spare, "_idle", lambda: self.counted)
        monkeypatch.setattr(spare, "_limit", lambda: None)

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.worked

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.counted += self.idle * seconds

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.worked += seconds


def took(machine: Machine, seconds: float, hurried: Callable[[], bool] = bool, piece: float = 0.004) -> float:
    """Seconds that so much work took."""
    pause, began = Spare(hurried).pause, machine.now
    for _ in range(round(seconds / piece)):
        machine.work(piece)
        pause()
    return machine.now - began


def test_beside_a_training_that_uses_everything_it_takes_a_small_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for idle in (0.0, 0.3, spare.ENOUGH - 0.05):
        taken = took(Machine(monkeypatch, idle), 2.0)
        assert 0.85 * spare.SHARE < 2.0 / taken <= 1.05 * spare.SHARE


def test_a_cpu_that_nobody_uses_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for idle in (spare.ENOUGH + 0.05, 1.0, 60.0):
        assert took(Machine(monkeypatch, idle), 8.0) < 8.0 * 1.15


def test_it_notices_that_a_training_begins_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1.0)
    pause = Spare().pause

    def share(seconds: float) -> float:
        until, before, began = machine.now + seconds, machine.worked, machine.now
        while machine.now < until:
            machine.work(0.004)
            pause()
        return (machine.worked - before) / (machine.now - began)

    assert share(20) > 0.9
    machine.idle = 0.0
    share(spare.PERIOD + 1)
    assert share(20) < 0.04
    machine.idle = 1.0
    share(spare.PERIOD + 1)
    assert share(20) > 0.9


def test_who_is_waited_for_does_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 0.0)
    assert took(machine, 2.0, lambda: True) == pytest.approx(2.0)
    soon = machine.now + 3.0
    assert took(machine, 2.0, lambda: machine.now > soon) < 3.0 + 2.0 + 0.2


def test_a_container_has_no_more_to_spare_than_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 30.0)
    training = 3.9
    monkeypatch.setattr(spare, "_limit", lambda: 4.0)
    monkeypatch.setattr(spare, "_used", lambda: machine.worked + training * machine.now)
    assert 2.0 / took(machine, 2.0) < 1.05 * spare.SHARE
    training = 2.0
    assert took(machine, 2.0) < 2.0 * 1.4


def test_where_nobody_can_say_it_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 0.0)
    monkeypatch.setattr(spare, "_idle", lambda: None)
    assert took(machine, 8.0) < 8.0 * 1.15


def test_the_kernel_is_understood() -> None:
    """Of this very machine: what is counted grows, and no faster than the time times the CPUs."""
    import os
    import time

    before, began = spare._idle(), time.monotonic()
    time.sleep(0.3)
    after, took = spare._idle(), time.monotonic() - began
    assert before is not None and after is not None
    assert before <= after <= before + (took + 0.1) * (os.cpu_count() or 1) + 0.1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000\n", None), ("150000 100000\n", 1.5), ("", None), ("nonsense", None), ("1 0\n", None)],
)
def test_the_limit_of_a_container(monkeypatch: pytest.MonkeyPatch, text: str, expected: float | None) -> None:
    monkeypatch.setattr(spare, "_read", lambda path: text)
    assert spare._limit() == expected


def test_the_use_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare, "_read", lambda path: "usage_usec 2500000\nuser_usec 1\n")
    assert spare._used() == 2.5
    monkeypatch.setattr(spare, "_read", lambda path: "")
    assert spare._used() is None
