"""Gangs of which only a part is up: which one releases its tasks, and that all of them run in the end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given, settings

from stoker.scheduling.gang_deadlock import FIRST_WAIT, LONGEST_WAIT, PATIENCE, Deadlock, PartialGang, wait


def half(id: str, up: int, wanted: int, *, seq: int = 0, since: float = 0, **more) -> PartialGang:
    return PartialGang(
        id, up, wanted, since, more.pop("within", 600), more.pop("priority", 0), seq, no_room=True, **more
    )


def gone(halves: list[PartialGang], now: float, standoff: Deadlock | None = None) -> list[str]:
    return [decided.id for decided in (standoff or Deadlock()).judge(halves, now)]


def test_a_start_that_takes_too_long_is_released():
    alone = half("alone", 1, 2, within=60)
    assert gone([alone], 59) == []
    (decided,) = Deadlock().judge([alone], 60)
    assert decided.reason == "only 1 of 2 tasks were up after 60 s"
    assert FIRST_WAIT / 2 <= decided.retry_after < FIRST_WAIT * 1.5


def test_of_two_blocked_gangs_the_later_is_released():
    pair = [half("late", 2, 4, seq=2), half("early", 2, 4, seq=1)]
    assert gone(pair, PATIENCE - 1) == []
    assert gone(pair, PATIENCE) == ["late"]


def test_the_lower_priority_is_released_first():
    assert gone([half("early", 2, 4, seq=1), half("urgent", 2, 4, seq=2, priority=1)], 100) == ["early"]


def test_only_as_many_are_released_as_the_first_gang_needs():
    crowd = [half(f"gang-{n}", 2, 4, seq=n) for n in range(5)]
    assert gone(crowd, 100) == ["gang-4"]
    assert gone([half("first", 2, 7, seq=0), *crowd[1:]], 100) == ["gang-4", "gang-3", "gang-2"]


def test_after_a_release_the_others_have_time():
    standoff = Deadlock()
    crowd = [half(f"gang-{n}", 2, 4, seq=n) for n in range(3)]
    assert gone(crowd, 100, standoff) == ["gang-2"]
    assert gone(crowd[:2], 101, standoff) == []
    assert gone(crowd[:2], 100 + PATIENCE, standoff) == ["gang-1"]


def test_the_first_gang_is_kept_beyond_its_timeout_while_others_make_room():
    standoff = Deadlock()
    pair = [half("first", 2, 4, seq=1, within=60), half("second", 2, 4, seq=2, within=60)]
    assert gone(pair, 60, standoff) == ["second"]
    assert gone(pair[:1], 61, standoff) == []
    assert gone(pair[:1], 60 + PATIENCE, standoff) == ["first"]


def test_gangs_in_different_clusters_do_not_block_one_another():
    assert gone([half("east", 2, 4, where="east"), half("west", 2, 4, where="west")], 100) == []


def test_a_gang_that_waits_for_an_image_blocks_no_other():
    slow = PartialGang("slow", 2, 4, 0, 600, 0, 1)
    assert gone([slow, half("other", 2, 4, seq=2)], 100) == []


def test_waits_double_and_differ_between_runs():
    waits = [[wait(f"run-{n}", tries) for n in range(50)] for tries in range(12)]
    assert all(len(set(row)) == 50 for row in waits)
    for tries, row in enumerate(waits):
        doubled = min(LONGEST_WAIT, FIRST_WAIT * 2**tries)
        assert all(doubled / 2 <= value < doubled * 1.5 for value in row)
    assert wait("run-1", 3) == wait("run-1", 3)
    steps = [
        {round(wait(f"run-{n}", tries) / FIRST_WAIT / 2**tries, 3) for tries in range(5)} for n in (1, 2)
    ]
    assert not steps[0] & steps[1]


# -- a cluster that places one pod at a time ---------------------------------------------------------------------


@dataclass
class Gang:
    id: str
    wanted: int
    arrives: float
    lasts: float
    priority: int
    seq: int
    up: int = 0
    since: float | None = None
    tries: int = 0
    runs_since: float | None = None
    done: bool = False
    asks_from: float = 0.0


@dataclass
class Cluster:
    """Free slots go to any gang that asks, in no order; a released slot is free only after a delay."""

    slots: int
    delay: float
    draw: random.Random
    gangs: list[Gang]
    free: int = 0
    ending: list[tuple[float, int]] = field(default_factory=list)
    standoff: Deadlock = field(default_factory=Deadlock)

    def tick(self, now: float, within: float) -> None:
        self.free += sum(count for at, count in self.ending if at <= now)
        self.ending = [(at, count) for at, count in self.ending if at > now]
        for gang in self.gangs:
            if gang.runs_since is not None and not gang.done and now - gang.runs_since >= gang.lasts:
                gang.done = True
                self.give_back(gang, now)
            if gang.since is None and not gang.done and now >= gang.asks_from:
                gang.since = now
        asking = [g for g in self.gangs if g.since is not None and not g.done for _ in range(g.wanted - g.up)]
        self.draw.shuffle(asking)
        for gang in asking[: self.free]:
            gang.up += 1
            self.free -= 1
            if gang.up == gang.wanted:
                gang.runs_since = now
        starting = [g for g in self.gangs if g.since is not None and g.runs_since is None]
        halves = [
            PartialGang(
                g.id, g.up, g.wanted, g.since or 0.0, within, g.priority, g.seq, g.tries, no_room=True
            )
            for g in starting
        ]
        decided = {let_go.id: let_go for let_go in self.standoff.judge(halves, now)}
        assert (
            not decided
            or self.ending
            or len(decided) < len(halves)
            or len(halves) == 1
            or all(now - half.since >= within for half in halves)
        ), "all let go at once"
        for gang in starting:
            if gang.id in decided:
                self.give_back(gang, now)
                gang.since, gang.tries = None, gang.tries + 1
                gang.asks_from = now + decided[gang.id].retry_after

    def give_back(self, gang: Gang, now: float) -> None:
        self.ending.append((now + self.draw.random() * self.delay, gang.up))
        gang.up = 0


@settings(max_examples=150, print_blob=True)
@given(
    slots=st.integers(2, 12),
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=8),
    delay=st.sampled_from([0.0, 5.0, 29.0, 60.0]),
    within=st.sampled_from([60.0, 300.0, 600.0]),
    lasts=st.sampled_from([1.0, 200.0, 2000.0]),
    seed=st.integers(0, 1 << 20),
)
def test_all_gangs_run_in_the_end(slots, sizes, delay, within, lasts, seed):
    """All gangs run in the end, for any number of gangs and any small number of slots."""
    draw = random.Random(seed)
    gangs = [
        Gang(
            f"gang-{n}", min(size, slots), 0.0, lasts, draw.choice([0, 0, 1]), n, asks_from=draw.random() * 50
        )
        for n, size in enumerate(sizes)
    ]
    cluster = Cluster(slots, delay, draw, gangs, free=slots)
    longest = len(gangs) * (lasts + 8 * (LONGEST_WAIT * 2 + within + delay + PATIENCE))
    now = 0.0
    while now < longest and not all(gang.done for gang in gangs):
        cluster.tick(now, within)
        now += 5.0
    assert all(gang.done for gang in gangs), [(g.id, g.up, g.wanted, g.tries) for g in gangs if not g.done]
