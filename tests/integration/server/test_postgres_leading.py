"""Leading and waiting, without a whole server: cut off, hanging, failing while it takes the lead."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from stoker.errors import NotLeading, StokerError
from stoker.server.leadership import Holder, Leadership
from stoker.store.leadership import LeaderLease
from stoker.testing.store_postgres import PostgresServer
from support.store.cutting import Cutter
from support.waiting import wait


class Candidate(Leadership):
    """A minimal server: adds to a common list when it leads and when it would end."""

    def __init__(self, name: str, url: str, lease: float, story: list[str]) -> None:
        self.name, self.story = name, story
        self.lock = tempfile.TemporaryFile()  # noqa: SIM115 - held as long as the server lives
        holder = Holder.of(self.lock.fileno(), name)
        super().__init__(url, holder=holder, url=f"http://{name}", lease=lease)

    def end(self) -> None:
        self.stop_waiting()
        self.leave()
        self.lock.close()

    def run(self, trouble: Exception | None = None) -> None:
        def take_up(epoch: int) -> None:
            self.story.append(f"{self.name} leads")
            if trouble is not None:
                raise trouble

        self.start(take_up)

    def _step_down(self, why: str) -> None:
        if not self._over.is_set():
            self.story.append(f"{self.name} ends")
            self.why = why
        self._over.set()
        self._ending.set()


def test_a_leader_that_stops_releases_the_lease_at_once(url: str) -> None:
    story: list[str] = []
    ada, bob = Candidate("ada", url, 10, story), Candidate("bob", url, 10, story)
    ada.run()
    wait(lambda: ada.leads)
    bob.run()
    wait(lambda: "ada leads" in bob.reason)
    refusal = bob.refusal()
    assert isinstance(refusal, NotLeading) and "http://ada" in (refusal.hint or "")
    ada.end()
    wait(lambda: bob.leads)
    assert story == ["ada leads", "bob leads"] and bob.epoch == 2
    bob.end()


def test_a_leader_that_is_cut_off_ends_before_another_leads(postgres: PostgresServer, url: str) -> None:
    story: list[str] = []
    with Cutter(postgres.root) as cutter:
        ada = Candidate("ada", url.replace(str(postgres.root), str(cutter.root)), 10, story)
        ada.run()
        wait(lambda: ada.leads)
        bob = Candidate("bob", url, 10, story)
        bob.run()
        wait(lambda: "ada leads" in bob.reason)
    for pid in postgres.backends(url):
        postgres.execute(f"SELECT pg_terminate_backend({pid})")
    wait(lambda: bob.leads)
    assert story == ["ada leads", "ada ends", "bob leads"]
    assert "not renewed" in ada.why
    bob.end()
    ada.end()


def test_a_database_that_hangs_does_not_hold_up_the_end(postgres: PostgresServer, url: str) -> None:
    ada = Candidate("ada", url, 3, [])
    ada.run()
    wait(lambda: ada.leads)
    victims = postgres.backends(url)
    assert victims
    for pid in victims:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait(lambda: ada.story == ["ada leads", "ada ends"])
    finally:
        for pid in victims:
            os.kill(pid, signal.SIGCONT)
    ada.end()


@pytest.mark.parametrize("trouble", [StokerError("no disk"), RuntimeError("a mistake")])
def test_a_server_that_cannot_take_up_the_lead_ends(url: str, trouble: Exception) -> None:
    ada = Candidate("ada", url, 5, [])
    ada.run(trouble)
    wait(lambda: ada.story == ["ada leads", "ada ends"])
    assert "cannot lead" in ada.why and not ada.leads
    ada.end()


def test_a_server_that_lost_the_lead_ends(url: str) -> None:
    ada = Candidate("ada", url, 5, [])
    ada.run()
    wait(lambda: ada.leads)
    thief = LeaderLease.open(url)
    wait(lambda: thief.take(thief.read(), "thief", "") is not None)
    wait(lambda: ada.story == ["ada leads", "ada ends"])
    assert "another server leads" in ada.why
    ada.end()
    assert thief.read().holder == "thief"
    thief.close()


def test_it_waits_for_a_database_that_is_not_there_yet(postgres: PostgresServer) -> None:
    ada = Candidate("ada", postgres.url("later"), 2, [])
    ada.run()
    wait(lambda: "does not exist" in ada.reason)
    postgres.execute("CREATE DATABASE later")
    wait(lambda: ada.leads)
    ada.end()


def test_the_same_place_is_known_again(tmp_path: Path) -> None:
    descriptors = [os.open(tmp_path / name, os.O_CREAT | os.O_RDWR) for name in ("a", "a", "b")]
    try:
        first, again, other = (Holder.of(fd, "a server") for fd in descriptors)
    finally:
        for fd in descriptors:
            os.close(fd)
    assert again.is_gone(str(first)) and not other.is_gone(str(first)) and other.is_gone("")
    assert str(first) != str(again) and len(str(first).split(" ")) == 3
