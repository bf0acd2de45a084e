"""Calling a courier from a worker thread: hashing is done here, only the bytes go through the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import time
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from stoker.engine.kubernetes.courier_client.client import (
    Answer,
    Courier,
    CourierGone,
    CourierLost,
    SignAnew,
    Signed,
)
from stoker.task import courier_protocol

T = TypeVar("T")

TIMEOUT = 60.0
"""Seconds for one call; what takes longer is asked for again and again."""
LONGEST_JOB = 7200.0
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0


class Pauses:
    """How long to wait before the next try, until it has been too long altogether."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.progress()

    def progress(self) -> None:
        """Something worked: begin anew."""
        self._end = time.monotonic() + self._patience
        self._pause = _FIRST_PAUSE

    def rest(self) -> bool:
        """Wait a little. False, without waiting: it has been long enough."""
        if time.monotonic() + self._pause >= self._end:
            return False
        time.sleep(self._pause)
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
        return True


class Pending:
    """A call on its way."""

    def __init__(self, courier: Courier, request: Signed, future: concurrent.futures.Future[Answer]) -> None:
        self._courier = courier
        self._request = request
        self._future = future

    def result(self) -> tuple[dict[str, Any], memoryview]:
        """Raises what Courier.check raises; SignAnew as CourierLost, since it was not obeyed."""
        try:
            return self._courier.check(self._request, _result(self._future, TIMEOUT + 5))
        except SignAnew as exc:
            raise CourierLost("it began anew") from exc

    def cancel(self) -> None:
        self._future.cancel()


class BlockingCalls:
    """Used from worker threads, never from the loop's own: that would wait for itself."""

    def __init__(self, courier: Courier, loop: asyncio.AbstractEventLoop, patience: float) -> None:
        self._courier = courier
        self._loop = loop
        self.patience = patience
        """Seconds that a courier which does not answer is tried again."""
        self.gone = ""
        """Why nobody will ever answer, once that is known."""

    def ask(
        self, verb: str, header: Mapping[str, Any], data: bytes = b""
    ) -> tuple[dict[str, Any], memoryview]:
        """One call, tried again while nobody answers."""
        body = courier_protocol.pack(header, data)
        pauses = Pauses(self.patience)
        anew = 0
        while True:
            request = self._courier.sign(verb, body)
            try:
                return self._courier.check(
                    request, self.wait(self._courier.send(request, TIMEOUT), TIMEOUT + 5)
                )
            except SignAnew:
                anew += 1
                if anew > 3 and not pauses.rest():
                    raise CourierLost("it begins anew all the time") from None
            except CourierLost:
                if not pauses.rest():
                    raise

    def job(self, verb: str, header: Mapping[str, Any]) -> dict[str, Any]:
        """Work that takes the courier long: asked for until it is done."""
        named = {**header, "job": secrets.token_hex(16)}
        end = time.monotonic() + LONGEST_JOB
        while time.monotonic() < end:
            answer, _ = self.ask(verb, named)
            if answer.get("running") is not True:
                return answer
        raise CourierLost(f"{verb} is not done after {LONGEST_JOB:.0f} s")

    def start(self, verb: str, header: Mapping[str, Any], data: bytes) -> Pending:
        """A call that others may overtake; never tried again."""
        request = self._courier.sign(verb, courier_protocol.pack(header, data))
        return Pending(self._courier, request, self._submit(self._courier.send(request, TIMEOUT)))

    def wait(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Let the loop do something, and wait for it."""
        return _result(self._submit(work), seconds)

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if self.gone:
            work.close()
            raise CourierGone(self.gone)
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            work.close()
            raise RuntimeError("a far task directory is used in the event loop's own thread")
        if self._loop.is_closed():
            work.close()
            raise CourierLost("the server is going away")
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def _result(future: concurrent.futures.Future[T], seconds: float) -> T:
    try:
        return future.result(seconds)
    except concurrent.futures.CancelledError as exc:
        raise CourierLost("the server is going away") from exc
    except TimeoutError as exc:
        future.cancel()
        raise CourierLost("the server's own event loop does not get to it") from exc
