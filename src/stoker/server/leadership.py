"""Which of several servers on one database leads; the others wait.

Only for databases that several servers share. With a database file the lock of the home decides. A waiting server
answers that it is healthy and not ready. The leader renews its lease all the time. The database refuses its writes
once another server has taken over. A leader that has lost the lease, or cannot renew it in time, ends its process at
once: everything in its memory was decided as leader. Its supervisor starts it again, as a waiting server.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from stoker.errors import NotLeading, StokerError, StoreError
from stoker.linux.process import boot_id
from stoker.store.leadership import Leader, LeaderLease

log = logging.getLogger(__name__)

STEPPED_DOWN = 69
"""Exit status of a server that has lost the lead."""
_RENEW_WITHIN = 0.8
"""Share of the lease after which a leader that could not renew ends: before another can have taken over."""
_JOIN_SECONDS = 10.0
"""Seconds to wait for each thread at the end."""


def now() -> float:
    """Seconds of a clock that also runs while this process is stopped or the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True)
class Holder:
    """What a server writes into the row: `NAME PLACE NONCE`.

    The place is the lock file that this server holds, since this boot of this machine. An earlier leader with the same
    place has ended for certain: it held that lock while it lived. So its lease need not run out."""

    name: str
    place: str
    nonce: str

    @classmethod
    def of(cls, lock: int, replica: str) -> Holder:
        found = os.fstat(lock)
        name = (replica or socket.gethostname()).replace(" ", "-")
        return cls(name, f"{boot_id()}:{found.st_dev}:{found.st_ino}", secrets.token_hex(8))

    def __str__(self) -> str:
        return f"{self.name} {self.place} {self.nonce}"

    def is_gone(self, holder: str) -> bool:
        """Whether the server of that holder has certainly ended."""
        return not holder or holder.split(" ")[1:2] == [self.place]


class Leadership:
    """Waits for the lead and holds it, in its own threads. One of them calls `activate` once, with the epoch; `leads`
    is True when that has returned."""

    def __init__(self, database: str, *, holder: Holder, url: str, lease: float) -> None:
        self._database = database
        self._holder = holder
        self._url = url
        self._lease = lease
        self._ending = threading.Event()
        self._over = threading.Event()
        self._renewed = now()
        self._threads: list[threading.Thread] = []
        self._leader_lease: LeaderLease | None = None
        self.epoch: int | None = None
        self.leads = False
        self.leader: Leader | None = None
        """The other server that leads, as far as known."""
        self.reason = "it does not know yet which server leads"
        """Why this server does not lead."""

    # -- for the server --------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connects to the database. Without this call, `start` waits until the database answers."""
        if self._leader_lease is None:
            self._leader_lease = LeaderLease.open(self._database)

    def start(self, activate: Callable[[int], None]) -> None:
        self._run("leading", lambda: self._lead_or_end(activate))

    def stop_waiting(self) -> None:
        """Does not take the lead from now on. A lead that is held is kept."""
        self._ending.set()
        self._threads[0].join(timeout=_JOIN_SECONDS)

    def leave(self) -> None:
        """Gives up the lead, so that the next server need not wait for the lease."""
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=_JOIN_SECONDS)
        if self._leader_lease is None:
            return
        try:
            if self.epoch is not None:
                self._leader_lease.release(self.epoch)
        except StoreError as exc:
            log.warning("could not give up the lead: %s", exc.message)
        self._leader_lease.close()

    def fenced(self) -> None:
        """Called by the store: another server has taken over."""
        self._step_down("another server leads now")

    def refusal(self) -> NotLeading:
        """The answer to requests while this server does not lead."""
        hint = "Ask again in a few seconds."
        if self.leader is not None and self.leader.url:
            hint = f"The server that leads said it is at {self.leader.url}."
        return NotLeading(f"this server waits: {self.reason}", hint=hint)

    # -- waiting ---------------------------------------------------------------------------------------------

    def _lead_or_end(self, activate: Callable[[int], None]) -> None:
        try:
            self._lead(activate)
        except StokerError as exc:
            self._step_down(f"cannot lead: {exc.message}")
        except Exception:  # any error: without this thread the server neither waits nor leads
            log.exception("unexpected error")
            self._step_down("cannot lead")

    def _lead(self, activate: Callable[[int], None]) -> None:
        epoch = self._wait()
        if epoch is None:
            return
        log.info("this server leads, epoch %d", epoch)
        self.epoch = epoch
        self.reason = "it has just begun to lead"
        self._run("renewing", lambda: self._renew(epoch))
        self._run("watching the lead", self._watch)
        activate(epoch)
        self.leader = None
        self.leads = True

    def _wait(self) -> int | None:
        """Waits until no other server leads and returns the epoch; None when the server ends first."""
        seen: Leader | None = None
        since = now()
        while not self._ending.is_set():
            try:
                self.connect()
                assert self._leader_lease is not None
                found = self._leader_lease.read()
                if found != seen:
                    self._note_leader(found, moved=seen is not None)
                    seen, since = found, now()
                if self._holder.is_gone(found.holder) or now() - since >= self._lease:
                    self._renewed = now()
                    epoch = self._leader_lease.take(found, str(self._holder), self._url)
                    if epoch is not None:
                        return epoch
            except StokerError as exc:
                # The leader could not renew either: its silence counts from when the database answers again.
                seen = None
                self._set_reason(exc.message)
            self._ending.wait(self._lease / 10)
        return None

    def _note_leader(self, found: Leader, *, moved: bool) -> None:
        name = found.holder.split(" ")[0] or "no server"
        self.leader = found if moved else None
        self._set_reason(f"{name} leads" if moved else f"{name} led and may still do so")

    def _set_reason(self, reason: str) -> None:
        if reason != self.reason:
            log.info("waiting: %s", reason)
        self.reason = reason

    # -- holding ---------------------------------------------------------------------------------------------

    def _renew(self, epoch: int) -> None:
        assert self._leader_lease is not None
        while not self._over.wait(self._lease / 5):
            began = now()
            try:
                self._leader_lease.renew(epoch)
            except NotLeading as exc:
                self._step_down(exc.message)
            except StoreError as exc:
                log.warning("cannot renew the lead: %s", exc.message)
            else:
                self._renewed = began

    def _watch(self) -> None:
        """Separate from renewing, which may hang."""
        while not self._over.wait(self._lease / 20):
            silent = now() - self._renewed
            if silent > self._lease * _RENEW_WITHIN:
                self._step_down(f"the lead was not renewed for {silent:.1f} s")

    def _step_down(self, why: str) -> None:
        log.error("%s; this server ends and can be started again", why)
        os._exit(STEPPED_DOWN)

    def _run(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
