"""Several copies for one training on one machine share the CPU time that one copy alone would use."""

from __future__ import annotations

import heapq
import itertools
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.linux import idle_throttle
from stoker.linux.idle_throttle import IdleThrottle

PIECE = 0.004


class Machine:
    """Workers in threads, of which one runs at a time: the one whose sleep or work ends first. No CPU is
    idle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.worked: dict[int, float] = {}
        self._due: list[tuple[float, int, threading.Semaphore]] = []
        self._order = itertools.count()
        """Order of threads that are due at the same time."""
        self._idle = threading.Semaphore(0)
        monkeypatch.setattr(idle_throttle, "time", self)
        monkeypatch.setattr(idle_throttle, "_idle", lambda: 0.0)
        monkeypatch.setattr(idle_throttle, "_group", lambda: (None, None))
        monkeypatch.setattr(idle_throttle, "random", random.Random(7))

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.worked.setdefault(threading.get_ident(), 0.0)

    def sleep(self, seconds: float) -> None:
        baton = threading.Semaphore(0)
        heapq.heappush(self._due, (self.now + seconds, next(self._order), baton))
        self._go_on()
        baton.acquire()

    def work(self, seconds: float) -> None:
        self.sleep(seconds)
        self.worked[threading.get_ident()] = self.thread_time() + seconds

    def run(self, *bodies: Callable[[], None]) -> list[int]:
        """The numbers of the threads, after all have ended."""
        started = [threading.Thread(target=self._body, args=(body,)) for body in bodies]
        for number, thread in enumerate(started):
            baton = threading.Semaphore(0)
            heapq.heappush(self._due, (self.now + number / 1000, next(self._order), baton))
            thread.baton = baton  # type: ignore[attr-defined]
            thread.start()
        self._go_on()
        self._idle.acquire()
        for thread in started:
            thread.join()
        return [int(thread.ident or 0) for thread in started]

    def _body(self, body: Callable[[], None]) -> None:
        threading.current_thread().baton.acquire()  # type: ignore[attr-defined]
        try:
            body()
        finally:
            self._go_on()

    def _go_on(self) -> None:
        if not self._due:
            self._idle.release()
            return
        self.now, _, baton = heapq.heappop(self._due)
        baton.release()


def until(machine: Machine, end: float, turns: str) -> Callable[[], None]:
    """Works and pauses until then."""

    def body() -> None:
        with IdleThrottle(lambda: machine.now >= end, turns) as rests:
            while machine.now < end:
                machine.work(PIECE)
                rests.pause()

    return body


@pytest.mark.parametrize("workers", [1, 2, 4, 16])
def test_all_workers_take_one_share_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    machine, turns = Machine(monkeypatch), str(tmp_path / "turns")
    began = machine.now
    ran = machine.run(*[until(machine, began + 500, turns) for _ in range(workers)])
    taken = [machine.worked[number] for number in ran]
    assert 0.8 * idle_throttle.SHARE < sum(taken) / 500 < 1.2 * idle_throttle.SHARE
    # The next turn goes to a random worker.
    assert min(taken) > 0.2 * sum(taken) / workers


def test_another_training_has_its_own_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    began = machine.now
    ran = machine.run(*[until(machine, began + 500, str(tmp_path / name)) for name in ("one", "another")])
    assert min(machine.worked[number] for number in ran) / 500 > 0.8 * idle_throttle.SHARE


def test_a_finished_worker_leaves_the_turn_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, turns = Machine(monkeypatch), str(tmp_path / "turns")
    began = machine.now
    _, longer = machine.run(until(machine, began + 20, turns), until(machine, began + 520, turns))
    assert machine.worked[longer] / 510 > 0.8 * idle_throttle.SHARE


def test_a_turn_that_is_never_given_back_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder is frozen, or is the training itself."""
    machine, turns = Machine(monkeypatch), str(tmp_path / "turns")
    holder = IdleThrottle(turns=turns)
    assert holder._turn.take(machine.now)
    began = machine.now
    (other,) = machine.run(until(machine, began + 10 * idle_throttle.PATIENCE, turns))
    assert machine.worked[other] > 5 * idle_throttle.SHARE * idle_throttle.PERIOD
    holder._turn.release()


def test_urgent_work_does_not_wait_for_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, turns = Machine(monkeypatch), str(tmp_path / "turns")
    holder = IdleThrottle(turns=turns)
    assert holder._turn.take(machine.now)
    soon = machine.now + 3.0
    rests = IdleThrottle(lambda: machine.now > soon, turns)
    machine.run(rests.pause)
    assert machine.now < soon + 0.5
    holder._turn.release()


def test_the_turn_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    turns = str(tmp_path / "turns")
    code = f"import time; from stoker.linux.idle_throttle import _Turn; t = _Turn({turns!r}); print(t.take(0), flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"True\n"
    ours = idle_throttle._Turn(turns)
    assert not ours.take(0.0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert ours.take(0.0)
    ours.release()


@pytest.mark.parametrize("kind", ["absent", "directory", "link"])
def test_without_a_lock_each_worker_takes_its_own_share(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "turns"
    if kind == "absent":
        place = tmp_path / "nowhere" / "turns"
    elif kind == "directory":
        place.mkdir()
    else:
        place.symlink_to(tmp_path / "elsewhere")
    one, other = (idle_throttle._Turn(str(place)) for _ in range(2))
    assert one.take(0.0) and other.take(0.0)
    one.release()
    other.release()
    assert not one.held and not (tmp_path / "elsewhere").exists()
