"""Background work uses what the machine has to spare, and a small share where it has nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from stoker.linux import idle_throttle
from stoker.linux.idle_throttle import IdleThrottle


class Machine:
    """Time passes only during work and sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, idle: float) -> None:
        self.now = 100.0
        self.worked = 0.0
        self.idle = idle
        """Idle CPUs while the throttled work pauses."""
        self.counted = 0.0
        monkeypatch.setattr(idle_throttle, "time", self)
        monkeypatch.setattr(idle_throttle, "_idle", lambda: self.counted)
        monkeypatch.setattr(idle_throttle, "_group", lambda: (None, None))

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
    """The seconds that this much work took."""
    pause, began = IdleThrottle(hurried).pause, machine.now
    for _ in range(round(seconds / piece)):
        machine.work(piece)
        pause()
    return machine.now - began


def test_beside_a_training_that_uses_all_cpus_it_takes_a_small_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for idle in (0.0, 0.3, idle_throttle.ENOUGH - 0.05):
        taken = took(Machine(monkeypatch, idle), 2.0)
        assert 0.85 * idle_throttle.SHARE < 2.0 / taken <= 1.05 * idle_throttle.SHARE


def test_an_idle_cpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for idle in (idle_throttle.ENOUGH + 0.05, 1.0, 60.0):
        assert took(Machine(monkeypatch, idle), 8.0) < 8.0 * 1.15


def test_it_adapts_when_a_training_begins_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1.0)
    pause = IdleThrottle().pause

    def share(seconds: float) -> float:
        until, before, began = machine.now + seconds, machine.worked, machine.now
        while machine.now < until:
            machine.work(0.004)
            pause()
        return (machine.worked - before) / (machine.now - began)

    assert share(20) > 0.9
    machine.idle = 0.0
    share(1.4 * idle_throttle.PERIOD + 1)
    assert share(20) < 0.04
    machine.idle = 1.0
    share(1.4 * idle_throttle.PERIOD + 1)
    assert share(20) > 0.9


def test_urgent_work_does_not_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 0.0)
    assert took(machine, 2.0, lambda: True) == pytest.approx(2.0)
    soon = machine.now + 3.0
    assert took(machine, 2.0, lambda: machine.now > soon) < 3.0 + 2.0 + 0.2


def test_the_limit_of_a_container_bounds_what_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 30.0)
    training = 3.9
    monkeypatch.setattr(idle_throttle, "_group", lambda: (4.0, machine.worked + training * machine.now))
    assert 2.0 / took(machine, 2.0) < 1.05 * idle_throttle.SHARE
    training = 2.0
    assert took(machine, 2.0) < 2.0 * 1.4


def test_without_figures_it_does_not_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 0.0)
    monkeypatch.setattr(idle_throttle, "_idle", lambda: None)
    assert took(machine, 8.0) < 8.0 * 1.15


def test_the_idle_time_of_this_machine() -> None:
    """On this machine: the idle time grows, and no faster than the time multiplied by the CPUs."""
    before, began = idle_throttle._idle(), time.monotonic()
    time.sleep(0.3)
    after, took = idle_throttle._idle(), time.monotonic() - began
    assert before is not None and after is not None
    assert before <= after <= before + (took + 0.1) * (os.cpu_count() or 1) + 0.1


def files(monkeypatch: pytest.MonkeyPatch, content: dict[str, str]) -> None:
    monkeypatch.setattr(idle_throttle, "_read", lambda path: content.get(path, ""))


def test_only_cpus_of_its_affinity_count(monkeypatch: pytest.MonkeyPatch) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    stat = "cpu 9 9 9 999999 9\ncpu0 1 2 3 400 50 6\ncpu1 1 2 3 100 20 6\ncpu10 1 2 3 7000 0 6\nintr 7\n"
    files(monkeypatch, {"/proc/stat": stat})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 10}, raising=False)
    assert idle_throttle._idle() == 7450 / tick
    files(monkeypatch, {"/proc/stat": "cpu 0 0 0 0 0\ncpu0 0 0 0 0 0\ncpu10 0 0 0 0 0\n"})
    assert idle_throttle._idle() is None, "a kernel that counts nothing"
    files(monkeypatch, {})
    assert idle_throttle._idle() is None


SECOND = {
    "/proc/self/mountinfo": "31 1 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    "/proc/self/cgroup": "0::/box\n",
    "/sys/fs/cgroup/box/cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
}
FIRST = {
    "/proc/self/mountinfo": "31 1 0:27 /box /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n",
    "/proc/self/cgroup": "4:cpu,cpuacct:/box\n",
    "/sys/fs/cgroup/cpu,cpuacct/cpuacct.usage": "2500000000\n",
    "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize(
    ("text", "limit"),
    [("max 100000\n", None), ("150000 100000\n", 1.5), ("", None), ("nonsense", None), ("1 0\n", None)],
)
def test_the_limit_of_a_group(monkeypatch: pytest.MonkeyPatch, text: str, limit: float | None) -> None:
    files(monkeypatch, {**SECOND, "/sys/fs/cgroup/box/cpu.max": text})
    assert idle_throttle._group() == ((None, None) if limit is None else (limit, 2.5))


@pytest.mark.parametrize(("text", "limit"), [("-1\n", None), ("150000\n", 1.5), ("", None)])
def test_the_limit_of_a_group_of_the_first_version(
    monkeypatch: pytest.MonkeyPatch, text: str, limit: float | None
) -> None:
    files(monkeypatch, {**FIRST, "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": text})
    assert idle_throttle._group() == ((None, None) if limit is None else (limit, 2.5))


def test_no_groups_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    files(monkeypatch, {})
    assert idle_throttle._group() == (None, None)


def test_pauses_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 0.0)
    rests, began = IdleThrottle(), machine.now
    for _ in range(50):
        machine.work(0.004)
        rests.pause()
    assert rests.rested == pytest.approx(machine.now - began - 50 * 0.004)
