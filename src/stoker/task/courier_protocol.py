"""The protocol between the server and a courier: authentication and framing of messages.

A proxy between them (the API server's ends TLS and verifies nothing) must not be able to change, repeat or exchange a
message. So every request and every answer carries a MAC of its own. Its key is 32 bytes that only the server and this
courier have:

    request   Stoker-Session: 1 NONCE BOOT SHA256(body) MAC     MAC over method, path and the fields before it
    answer    Stoker-Session: 1 SHA256(body) MAC                MAC over the request's nonce and the status too

A courier authenticates a request before it reads the body. It remembers the nonces of its boot. A request with another
boot id is answered with the right one (409), so a request recorded before a restart is never obeyed. When too many nonces
are remembered, a new boot id is made. No clocks are compared.

A body is a length, a JSON object and bytes (`pack`, `unpack`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import struct
import threading
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Set, Tuple, Union

from stoker.task import layout

PORT = 7447
KEY_BYTES = 32
MAX_BODY = 8 << 20
"""Bytes of one request or answer."""
MAX_JSON = 1 << 20
"""Bytes of its JSON part. Parsed, it takes many times as much memory."""
RANGE = 4 << 20
"""Bytes of a file in one message; the rest of the body is for the JSON part."""
SESSION = "Stoker-Session"

SYNC = "/v1/sync"
ORDER = "/v1/order"
READ = "/v1/read"
MISSING = "/v1/missing"
BLOB = "/v1/blob"
PLACE = "/v1/place"
WALK = "/v1/walk"
DISCARD = "/v1/discard"
SETTLE = "/v1/settle"
PARTS = "/v1/parts"
SALVAGE = "/v1/salvage"
HEALTH = "/healthz"

Bytes = Union[bytes, bytearray, memoryview]

_VERSION = "1"
_HEX = re.compile(r"[0-9a-f]{16,64}")
_LENGTH = struct.Struct("!I")


class Forged(Exception):
    """The message was not signed with this key, or was changed on the way."""


class Malformed(ValueError):
    """The message is authentic, but not well-formed."""


class WrongBoot(Exception):
    """The request names another boot of this courier, or repeats a nonce. Sign it again with the right boot id."""


class Claim(NamedTuple):
    """The fields of an authentic request."""

    nonce: str
    boot: str
    digest: str
    """SHA-256 of the body that must follow."""


# -- authenticity --------------------------------------------------------------------------------------------


def new_nonce() -> str:
    return os.urandom(16).hex()


def sign_request(key: bytes, method: str, path: str, nonce: str, boot: str, body: Bytes) -> str:
    """The value of the Stoker-Session header. `boot`: the courier's boot id, or UNKNOWN_BOOT."""
    digest = hashlib.sha256(body).hexdigest()
    return " ".join((_VERSION, nonce, boot, digest, _mac(key, "request", method, path, nonce, boot, digest)))


def check_request(key: bytes, method: str, path: str, header: str) -> Claim:
    """Raises Forged. `check_body` checks the body once it has been read."""
    fields = header.split(" ")
    if len(fields) != 5 or fields[0] != _VERSION:
        raise Forged("no session header of this version")
    nonce, boot, digest, mac = fields[1:]
    if not (_HEX.fullmatch(nonce) and _HEX.fullmatch(boot) and _HEX.fullmatch(digest)):
        raise Forged("no session header")
    if not hmac.compare_digest(
        mac.encode(), _mac(key, "request", method, path, nonce, boot, digest).encode()
    ):
        raise Forged("the request is not signed with this key")
    return Claim(nonce, boot, digest)


def check_body(claim: Claim, body: Bytes) -> None:
    if not hmac.compare_digest(hashlib.sha256(body).hexdigest(), claim.digest):
        raise Forged("the body is not the one that was signed")


def sign_answer(key: bytes, nonce: str, status: int, body: Iterable[Bytes]) -> str:
    digest = _digest(body)
    return " ".join((_VERSION, digest, _mac(key, "answer", nonce, str(status), digest)))


def check_answer(key: bytes, nonce: str, status: int, header: str, body: Bytes) -> None:
    """Raises Forged unless this is what the courier answered to the request with this nonce."""
    fields = header.split(" ")
    if len(fields) != 3 or fields[0] != _VERSION:
        raise Forged("the answer is not signed")
    digest, mac = fields[1:]
    if not hmac.compare_digest(mac.encode(), _mac(key, "answer", nonce, str(status), digest).encode()):
        raise Forged("the answer is not signed with this key, or is not to this request")
    if not hmac.compare_digest(hashlib.sha256(body).hexdigest().encode(), digest.encode()):
        raise Forged("the answer's body is not the one that was signed")


UNKNOWN_BOOT = "0" * 32


class Guard:
    """The courier's record of the requests it has accepted. May be used from any thread."""

    def __init__(self, most: int = 1 << 14) -> None:
        """`most`: nonces to remember before a new boot id is made."""
        self._most = most
        self._lock = threading.Lock()
        self._seen: Set[bytes] = set()
        self._boot = os.urandom(16).hex()

    @property
    def boot(self) -> str:
        return self._boot

    def admit(self, claim: Claim) -> None:
        """Raises WrongBoot unless the request is for this boot and its nonce is new."""
        nonce = bytes.fromhex(claim.nonce) if len(claim.nonce) % 2 == 0 else claim.nonce.encode()
        with self._lock:
            if claim.boot != self._boot or nonce in self._seen:
                raise WrongBoot
            self._seen.add(nonce)
            if len(self._seen) >= self._most:
                self._boot = os.urandom(16).hex()
                self._seen = set()


def _mac(key: bytes, kind: str, *fields: str) -> str:
    """No field can contain the separator: they are hex, digits, a method and a path."""
    message = "\n".join((f"stoker {kind} {_VERSION}", *fields)).encode()
    return hmac.new(key, message, hashlib.sha256).hexdigest()


def _digest(body: Iterable[Bytes]) -> str:
    found = hashlib.sha256()
    for piece in body:
        found.update(piece)
    return found.hexdigest()


# -- framing -------------------------------------------------------------------------------------------------


def head(header: Mapping[str, Any]) -> bytes:
    """The start of a body: length and JSON. The bytes follow. Raises Malformed when the JSON is too large."""
    raw = json.dumps(header, separators=(",", ":")).encode()
    if len(raw) > MAX_JSON:
        raise Malformed(f"{len(raw)} bytes of JSON, over the {MAX_JSON} of a message")
    return _LENGTH.pack(len(raw)) + raw


def pack(header: Mapping[str, Any], data: Bytes = b"") -> bytes:
    return b"".join((head(header), data))


def unpack(body: Bytes) -> Tuple[Dict[str, Any], memoryview]:
    """The JSON object and the bytes. Raises Malformed. The caller has limited the size of the body."""
    view = memoryview(body)
    if len(view) < _LENGTH.size:
        raise Malformed("the message is shorter than its length field")
    (length,) = _LENGTH.unpack_from(view)
    end = _LENGTH.size + length
    if length > MAX_JSON or end > len(view):
        raise Malformed("the JSON part is longer than the message, or too long")
    try:
        header = json.loads(bytes(view[_LENGTH.size : end]))
    except (ValueError, RecursionError) as exc:
        raise Malformed("the message is not JSON") from exc
    if not isinstance(header, dict):
        raise Malformed("the JSON part of the message is not an object")
    return header, view[end:]


# -- mirrored files ------------------------------------------------------------------------------------------

RECORDS = (layout.STATUS, layout.ORDER, layout.TASK)
"""Small files that are replaced as a whole."""
LARGEST_RECORD = 1 << 20
GROWING = (layout.JOURNAL, layout.SAMPLES)
TAIL = 256
"""The server sends a tag of the last TAIL bytes it has of a file. The courier compares it with its own file, which may have been
replaced."""

_LOG = re.compile(r"[0-9]{6,12}\.log")
_METRICS = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,199}\.jsonl")


def grows(path: str) -> bool:
    """Whether the file at this path is mirrored by appending. Both sides refuse any other path."""
    folder, _, name = path.rpartition("/")
    if folder == layout.LOG:
        return _LOG.fullmatch(name) is not None
    if folder == layout.METRICS:
        return _METRICS.fullmatch(name) is not None
    return path in GROWING


def tag(data: Bytes) -> str:
    """A short hash that identifies a version of a record, or a tail."""
    return hashlib.sha256(data).hexdigest()[:16]


def strings(value: Any, most: int) -> List[str]:
    """A list of at most so many strings, or Malformed."""
    if not isinstance(value, list) or len(value) > most or not all(isinstance(item, str) for item in value):
        raise Malformed("not a list of strings, or too long")
    return value


def number(value: Any, most: int = (1 << 63) - 1) -> int:
    """An integer from 0 to `most`, or Malformed."""
    if type(value) is not int or not 0 <= value <= most:
        raise Malformed(f"not a number from 0 to {most}: {str(value)[:40]!r}")
    return value


def text(value: Any, most: int = 8192) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise Malformed("not a string, or too long")
    return value
