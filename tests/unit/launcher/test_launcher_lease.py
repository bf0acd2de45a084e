"""The rule of the lease (stoker/launcher/lease.py), on a clock that only the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.launcher.lease import MISSED_CHECKS, REPRIEVE, Lease
from stoker.task.fencing import LEASE_MARGIN

LEASE = 1000.0
EVERY = 5.0


class Story:
    """A launcher that looks, and a server that makes contact or does not."""

    def __init__(self, lease: float = LEASE, *, exclusive: bool = False) -> None:
        self.now = 50.0
        self.lease = Lease(lease, self.now, exclusive=exclusive)
        self.contact = 0
        self.ended: float | None = None

    def look(self) -> None:
        if self.ended is None and self.lease.look(self.now, self.contact):
            self.ended = self.now

    def goes_on(self, seconds: float, asked_every: float | None = None) -> None:
        """The launcher looks when due; the server makes contact meanwhile, or not."""
        end = self.now + seconds
        asked = self.now
        while self.now < end and self.ended is None:
            self.now = min(end, self.lease.due)
            if asked_every is not None and self.now - asked >= asked_every:
                self.contact += 1
                asked = self.now
            self.look()

    def is_away(self, seconds: float, *, asked: bool = False) -> None:
        """Stopped or frozen: the launcher looks only afterwards."""
        self.now += seconds
        self.contact += asked
        self.look()


def test_without_contact_it_ends_after_its_lease() -> None:
    story = Story()
    story.goes_on(LEASE - EVERY)
    assert story.ended is None
    story.goes_on(LEASE)
    assert story.ended == pytest.approx(50.0 + LEASE, abs=EVERY)


def test_contact_extends_the_lease() -> None:
    story = Story()
    story.goes_on(20 * LEASE, asked_every=LEASE / 2)
    assert story.ended is None
    asked = story.now
    story.goes_on(3 * LEASE)
    assert story.ended is not None and story.ended - asked <= LEASE + EVERY


def test_after_a_sleep_the_server_has_time_for_contact() -> None:
    story = Story()
    story.is_away(30 * LEASE)
    assert story.ended is None
    story.goes_on(REPRIEVE / 2)
    story.contact += 1
    story.goes_on(LEASE / 2)
    assert story.ended is None
    story.goes_on(2 * LEASE)
    assert story.ended is not None


@pytest.mark.parametrize("asked", [False, True], ids=["no contact", "contact just before the sleep"])
def test_after_a_sleep_it_ends_without_a_new_contact(asked: bool) -> None:
    story = Story()
    story.is_away(30 * LEASE, asked=asked)
    woke = story.now
    story.goes_on(LEASE)
    assert story.ended == pytest.approx(woke + REPRIEVE, abs=EVERY)


def test_a_short_sleep_does_not_count() -> None:
    story = Story()
    story.goes_on(LEASE / 2)
    story.is_away(MISSED_CHECKS * EVERY * 2)
    story.goes_on(LEASE)
    assert story.ended == pytest.approx(50.0 + LEASE, abs=MISSED_CHECKS * EVERY)


@pytest.mark.parametrize("asked", [False, True])
def test_exclusive_ends_at_once_after_its_lease(asked: bool) -> None:
    story = Story(exclusive=True)
    story.is_away(LEASE + 1, asked=asked)
    assert story.ended == story.now


@given(
    st.lists(
        st.tuples(st.sampled_from(["goes on", "away"]), st.floats(0.1, 3000), st.booleans()), max_size=25
    )
)
def test_exclusive_ends_before_the_server_gives_its_place_away(steps: list[tuple[str, float, bool]]) -> None:
    """A launcher that was frozen for longer than that ends at once."""
    story = Story(exclusive=True)
    asked = story.now
    for what, seconds, contact in steps:
        if contact:
            story.contact += 1
            asked = story.now
        alive = story.ended is None
        if what == "away":
            story.is_away(seconds)
            if alive and story.now - asked > LEASE:
                assert story.ended == story.now
        else:
            story.goes_on(seconds)
        if story.ended is None:
            assert story.now - asked <= LEASE * LEASE_MARGIN
