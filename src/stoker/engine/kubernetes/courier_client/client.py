"""Authenticated calls to one courier.

Signing and checking hash every byte, so both are separate from sending. Code that moves much data does them in a
worker thread (see RemoteTaskDir); only the bytes go through the event loop.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.engine.kubernetes.courier_client.transport import Transport
from stoker.errors import BlobDamaged, StokerError
from stoker.task import courier_protocol
from stoker.task.directory import Unreachable
from stoker.task.local_directory import UnsafePath

Answer = tuple[int, Mapping[str, str], bytes]


class CourierLost(Unreachable):
    """No authentic answer: the pod, its node or the route there is unavailable, for now or for good. This says
    nothing about the task. Its errno is EIO, so that transfers are tried again."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EIO, f"the task's courier does not answer: {reason}")


class CourierGone(Unreachable):
    """The pod is proven gone: it will never answer. Such calls are not tried again."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EHOSTDOWN, f"the task's courier is gone: {reason}")


class CourierBusy(CourierLost):
    """The courier has too much to do at the moment."""


class Incomplete(OSError):
    """A tree cannot be placed yet: some of its content has not arrived, or was lost."""


class SignAgain(Exception):
    """The request was signed for another boot of the courier, which did not execute it."""


@dataclass(frozen=True)
class Signed:
    """A request that is ready to be sent once."""

    verb: str
    nonce: str
    headers: Mapping[str, str]
    body: bytes = field(repr=False)


class Courier:
    """The client of one courier. `call` is used from one event loop, `sign` and `check` from any thread."""

    def __init__(self, key: bytes, transport: Transport) -> None:
        if len(key) != courier_protocol.KEY_BYTES:
            raise ValueError(f"a courier's key has {courier_protocol.KEY_BYTES} bytes, not {len(key)}")
        self._key = key
        self._transport = transport
        self._boot = courier_protocol.UNKNOWN_BOOT

    async def call(
        self, verb: str, header: Mapping[str, Any], data: bytes = b"", *, timeout: float = 30.0
    ) -> tuple[dict[str, Any], memoryview]:
        """The courier's answer. Raises CourierLost, or the courier's OSError (FileNotFoundError, ...)."""
        body = courier_protocol.pack(header, data)
        for _ in range(3):
            request = self.sign(verb, body)
            try:
                return self.check(request, await self.send(request, timeout))
            except SignAgain:
                continue
        raise CourierLost("it restarts again and again")

    def sign(self, verb: str, body: bytes) -> Signed:
        nonce = courier_protocol.new_nonce()
        session = courier_protocol.sign_request(self._key, "POST", verb, nonce, self._boot, body)
        return Signed(
            verb, nonce, {courier_protocol.SESSION: session, "Content-Type": "application/octet-stream"}, body
        )

    async def send(self, request: Signed, timeout: float) -> Answer:
        """Raises CourierLost."""
        try:
            return await self._transport.call(request.verb, request.headers, request.body, timeout)
        except TimeoutError as exc:
            raise CourierLost(f"no answer within {timeout:.0f} s") from exc
        except (OSError, StokerError) as exc:
            raise CourierLost(str(exc)) from exc

    def check(self, request: Signed, answer: Answer) -> tuple[dict[str, Any], memoryview]:
        """The content of an answer, once it is known to be the courier's. Raises what `call` raises, and SignAgain."""
        status, headers, body = answer
        try:
            courier_protocol.check_answer(
                self._key, request.nonce, status, headers.get(courier_protocol.SESSION.lower(), ""), body
            )
            header, data = courier_protocol.unpack(body)
        except courier_protocol.Forged as exc:
            said = bytes(body[:200]).decode("utf-8", "replace").strip()
            raise CourierLost(f"{exc} (HTTP {status}{': ' if said else ''}{said})") from exc
        except courier_protocol.Malformed as exc:
            raise CourierLost(f"invalid answer: {exc}") from exc
        if status == 409 and isinstance(header.get("boot"), str):
            self._boot = header["boot"]
            raise SignAgain
        if status != 200:
            raise _error(request.verb, status, header)
        return header, data


def _error(verb: str, status: int, header: Mapping[str, Any]) -> Exception:
    """The courier's error. A pod may send anything: only errors that the verb can cause are taken over."""
    text = str(header.get("error"))[:1000]
    code = header.get("errno")
    if verb == courier_protocol.WALK and status == 413:
        return ValueError(text)
    if verb in (courier_protocol.BLOB, courier_protocol.PLACE) and header.get("damaged") is True:
        return BlobDamaged(text)
    if verb == courier_protocol.PLACE and header.get("incomplete") is True:
        return Incomplete(errno.EIO, text)
    if status == 503:
        return CourierBusy(text)
    if header.get("unsafe") is True:
        return UnsafePath(errno.EPERM, text)
    if type(code) is int and 0 < code < 4096:
        return OSError(code, text)
    return OSError(errno.EPROTO, f"the courier refused: {text} (HTTP {status})")
