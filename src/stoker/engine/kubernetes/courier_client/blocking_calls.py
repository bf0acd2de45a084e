"""Calls to a courier from a worker thread. Hashing is done in that thread; only the bytes go through the event loop."""

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
    SignAgain,
    Signed,
)
from stoker.task import courier_protocol

T = TypeVar("T")

TIMEOUT = 60.0
"""Seconds for one call; a longer job is asked for repeatedly."""
LONGEST_JOB = 7200.0
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0


class Pauses:
    """Growing pauses between tries, until `patience` seconds have passed without progress."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self.progress()

    def progress(self) -> None:
        """A try succeeded: start again with the shortest pause and the full time."""
        self._end = time.monotonic() + self._patience
        self._pause = _FIRST_PAUSE

    def pause(self) -> bool:
        """Pause. False, without a pause, when the time is over."""
        if time.monotonic() + self._pause >= self._end:
            return False
        time.sleep(self._pause)
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)
        return True


class Pending:
    def __init__(self, courier: Courier, request: Signed, future: concurrent.futures.Future[Answer]) -> None:
        self._courier = courier
        self._request = request
        self._future = future

    def result(self) -> tuple[dict[str, Any], memoryview]:
        """Raises what Courier.check raises; SignAgain as CourierLost, since the request was not executed."""
        try:
            return self._courier.check(self._request, _result(self._future, TIMEOUT + 5))
        except SignAgain as exc:
            raise CourierLost("it has restarted") from exc

    def cancel(self) -> None:
        self._future.cancel()


class BlockingCalls:
    """Used from worker threads, never from the loop's own thread, which would wait for itself."""

    def __init__(self, courier: Courier, loop: asyncio.AbstractEventLoop, patience: float) -> None:
        self._courier = courier
        self._loop = loop
        self.patience = patience
        """Seconds for which a courier that does not answer is tried again."""
        self.gone = ""
        """Why the courier will never answer again, once that is known."""

    def call(
        self, verb: str, header: Mapping[str, Any], data: bytes = b""
    ) -> tuple[dict[str, Any], memoryview]:
        """One call, tried again while there is no answer."""
        body = courier_protocol.pack(header, data)
        pauses = Pauses(self.patience)
        restarts = 0
        while True:
            request = self._courier.sign(verb, body)
            try:
                return self._courier.check(
                    request, self.wait(self._courier.send(request, TIMEOUT), TIMEOUT + 5)
                )
            except SignAgain:
                restarts += 1
                if restarts > 3 and not pauses.pause():
                    raise CourierLost("it restarts again and again") from None
            except CourierLost:
                if not pauses.pause():
                    raise

    def job(self, verb: str, header: Mapping[str, Any]) -> dict[str, Any]:
        """Work that takes the courier long: asked for repeatedly until it is done."""
        named = {**header, "job": secrets.token_hex(16)}
        end = time.monotonic() + LONGEST_JOB
        while time.monotonic() < end:
            answer, _ = self.call(verb, named)
            if answer.get("running") is not True:
                return answer
        raise CourierLost(f"{verb} has not finished after {LONGEST_JOB:.0f} s")

    def start(self, verb: str, header: Mapping[str, Any], data: bytes) -> Pending:
        """A call that does not wait for others, and is not tried again."""
        request = self._courier.sign(verb, courier_protocol.pack(header, data))
        return Pending(self._courier, request, self._submit(self._courier.send(request, TIMEOUT)))

    def wait(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Run a coroutine in the loop, and wait for its result."""
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
            raise RuntimeError("a remote task directory is used in the event loop's own thread")
        if self._loop.is_closed():
            work.close()
            raise CourierLost("the server is shutting down")
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def _result(future: concurrent.futures.Future[T], seconds: float) -> T:
    try:
        return future.result(seconds)
    except concurrent.futures.CancelledError as exc:
        raise CourierLost("the server is shutting down") from exc
    except TimeoutError as exc:
        future.cancel()
        raise CourierLost("the server's event loop is too busy") from exc
