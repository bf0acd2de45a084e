"""The protocol between the remote shell and its client (the agent).

Both prove that they have the world's key, with a nonce of each side; the agent's proof includes the command. Then the shell
sends frames: a letter (`o` stdout, `e` stderr, `x` the exit status), the length, the content. When the connection is closed, the
command is ended.

    shell  {"nonce": A}
    agent  {"nonce": B, "command": C, "mac": HMAC(key, "agent" A B C)}
    shell  {"mac": HMAC(key, "shell" A B C)}
    shell  frames
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
from typing import Any, Dict, Optional, Tuple

LONGEST = 1 << 20
"""Bytes of one message before the frames."""
PATIENCE = 30.0
"""Seconds for each step of the handshake."""
SILENCE = 30
"""Seconds after which a peer that acknowledges nothing counts as gone."""
_HEAD = struct.Struct("!cI")


class Refused(Exception):
    """The peer is not of this world, or does not keep to the protocol."""


def nonce() -> str:
    return os.urandom(16).hex()


def proof(key: str, side: str, first: str, second: str, command: str) -> str:
    text = json.dumps([side, first, second, command]).encode()
    return hmac.new(key.encode(), text, hashlib.sha256).hexdigest()


def same(mine: str, theirs: Any) -> bool:
    return isinstance(theirs, str) and hmac.compare_digest(mine.encode(), theirs.encode())


def send(sock: socket.socket, message: Dict[str, Any]) -> None:
    sock.sendall(json.dumps(message).encode() + b"\n")


def receive(sock: socket.socket) -> Dict[str, Any]:
    """Read one line of JSON. Byte by byte, because the frames after it are read by other code."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte or len(line) > LONGEST:
            raise Refused("the connection was closed during the handshake")
        line += byte
    try:
        message = json.loads(line.decode())
    except ValueError as exc:
        raise Refused(f"the handshake is not JSON: {exc}") from exc
    if not isinstance(message, dict):
        raise Refused("the handshake is not a JSON object")
    return message


def frame(kind: bytes, data: bytes) -> bytes:
    return _HEAD.pack(kind, len(data)) + data


def read_frame(sock: socket.socket) -> Optional[Tuple[bytes, bytes]]:
    """Read one frame; None: the peer is gone."""
    head = _exactly(sock, _HEAD.size)
    if head is None:
        return None
    kind, size = _HEAD.unpack(head)
    data = _exactly(sock, size)
    return None if data is None else (kind, data)


def notice_silence(sock: socket.socket) -> None:
    """Set keepalive and timeouts: otherwise a peer whose machine is gone would never be noticed."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE * 1000)


def _exactly(sock: socket.socket, size: int) -> Optional[bytes]:
    data = bytearray()
    while len(data) < size:
        try:
            part = sock.recv(min(size - len(data), 1 << 16))
        except OSError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)
