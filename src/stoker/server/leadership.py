"""Which of several servers on one database leads; the others wait.

Only for databases that several servers reach: with the file in a home, the lock of the home decides. A server
that waits answers that it is well and that it is not ready. One that leads renews its lead all the time, and the
database refuses its writes from the moment another has taken over. When it has lost the lead, or cannot renew it
in time, it ends its process on the spot: all it holds in memory was decided as leader. Whoever starts servers
starts it again, and it comes back as one that waits.
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
_SURE = 0.8
"""Part of the lease after which a leader that could not renew ends: before another can have taken over."""
_GOODBYE = 10.0
"""Seconds for the last words."""


def now() -> float:
    """Seconds that also pass while this process is stopped or the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True)
class Holder:
    """What a server writes into the row: `NAME PLACE NONCE`.

    The place is the lock file this server holds, on this start of this machine. A leader of the same place is
    gone for certain, because it held that lock for as long as it lived: no need to wait for its silence."""

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
        """Whether that holder is nobody any more."""
        return not holder or holder.split(" ")[1:2] == [self.place]


class Leadership:
    """Waits for the lead and holds it, in threads of its own. `take_up` is called once, with the epoch, in one of
    them; `leads` is True when it has returned."""

    def __init__(self, database: str, *, holder: Holder, url: str, lease: float) -> None:
        self._database = database
        self._holder = holder
        self._url = url
        self._lease = lease
        self._ending = threading.Event()
        self._over = threading.Event()
        self._renewed = now()
        self._threads: list[threading.Thread] = []
        self._seat: LeaderLease | None = None
        self.epoch: int | None = None
        self.leads = False
        self.leader: Leader | None = None
        """Who else leads, as far as we saw."""
        self.reason = "it has not yet found out who leads"
        """Why this server does not lead."""

    # -- for the server --------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Find the database. Without this call first, `start` waits until it is there."""
        if self._seat is None:
            self._seat = LeaderLease.open(self._database)

    def start(self, take_up: Callable[[int], None]) -> None:
        self._run("leading", lambda: self._lead_or_end(take_up))

    def stop_waiting(self) -> None:
        """From now on the lead is not taken; one that is held is kept."""
        self._ending.set()
        self._threads[0].join(timeout=_GOODBYE)

    def leave(self) -> None:
        """Give it up, so that the next does not have to wait."""
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=_GOODBYE)
        if self._seat is None:
            return
        try:
            if self.epoch is not None:
                self._seat.leave(self.epoch)
        except StoreError as exc:
            log.warning("could not say goodbye: %s", exc.message)
        self._seat.close()

    def fenced(self) -> None:
        """For the store: another server has taken over."""
        self._step_down("another server leads now")

    def refusal(self) -> NotLeading:
        """What those are told who ask a server that does not lead."""
        hint = "Ask again in a few seconds."
        if self.leader is not None and self.leader.url:
            hint = f"The server that leads said it is at {self.leader.url}."
        return NotLeading(f"this server waits: {self.reason}", hint=hint)

    # -- waiting ---------------------------------------------------------------------------------------------

    def _lead_or_end(self, take_up: Callable[[int], None]) -> None:
        try:
            self._lead(take_up)
        except StokerError as exc:
            self._step_down(f"cannot lead: {exc.message}")
        except Exception:  # whatever it is: a server that waits or leads without this thread does neither
            log.exception("unexpected trouble")
            self._step_down("cannot lead")

    def _lead(self, take_up: Callable[[int], None]) -> None:
        epoch = self._wait()
        if epoch is None:
            return
        log.info("this server leads, epoch %d", epoch)
        self.epoch = epoch
        self.reason = "it has just begun to lead"
        self._run("renewing", lambda: self._renew(epoch))
        self._run("watching the lead", self._watch)
        take_up(epoch)
        self.leader = None
        self.leads = True

    def _wait(self) -> int | None:
        """The epoch, once there is nobody else; None when the server ends first."""
        seen: Leader | None = None
        since = now()
        while not self._ending.is_set():
            try:
                self.connect()
                assert self._seat is not None
                found = self._seat.see()
                if found != seen:
                    self._note(found, moved=seen is not None)
                    seen, since = found, now()
                if self._holder.is_gone(found.holder) or now() - since >= self._lease:
                    self._renewed = now()
                    epoch = self._seat.take(found, str(self._holder), self._url)
                    if epoch is not None:
                        return epoch
            except StokerError as exc:
                # Whoever leads could not renew either: the silence counts from when the database is back.
                seen = None
                self._say(exc.message)
            self._ending.wait(self._lease / 10)
        return None

    def _note(self, found: Leader, *, moved: bool) -> None:
        name = found.holder.split(" ")[0] or "nobody"
        self.leader = found if moved else None
        self._say(f"{name} leads" if moved else f"{name} led and may still do so")

    def _say(self, reason: str) -> None:
        if reason != self.reason:
            log.info("waiting: %s", reason)
        self.reason = reason

    # -- holding ---------------------------------------------------------------------------------------------

    def _renew(self, epoch: int) -> None:
        assert self._seat is not None
        while not self._over.wait(self._lease / 5):
            began = now()
            try:
                self._seat.renew(epoch)
            except NotLeading as exc:
                self._step_down(exc.message)
            except StoreError as exc:
                log.warning("cannot renew the lead: %s", exc.message)
            else:
                self._renewed = began

    def _watch(self) -> None:
        """Apart from renewing, which may hang."""
        while not self._over.wait(self._lease / 20):
            silent = now() - self._renewed
            if silent > self._lease * _SURE:
                self._step_down(f"the lead was not renewed for {silent:.1f} s")

    def _step_down(self, why: str) -> None:
        log.error("%s; this server ends and can be started again", why)
        os._exit(STEPPED_DOWN)

    def _run(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
