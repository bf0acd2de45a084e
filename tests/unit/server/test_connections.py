"""Connections of people who want nothing but to hold them. Anybody on the machine can open one."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

import pytest

from stoker.server import serving, startup
from stoker.settings import Home


def closed(sock: socket.socket) -> bool:
    """Whether the other side let go; waits for it."""
    sock.settimeout(30)
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("said", [b"", b"GET /heal", b"GET /healthz HTTP/1.1\r\nHost: x\r\n"])
def test_headers_that_never_end_are_not_waited_for(
    rig: Any, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(serving, "HEAD_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", rig.port), 30) as sock:
        sock.sendall(said)
        assert closed(sock)
    assert rig.client.health()["status"] == "ok"


def test_a_slow_second_request_is_not_waited_for_either(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "HEAD_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", rig.port), 30) as sock:
        sock.sendall(f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{rig.port}\r\n\r\n".encode())
        assert sock.recv(4096).split()[1] == b"200"
        sock.sendall(b"GET /heal")
        while sock.recv(4096):
            pass


def test_more_connections_than_there_may_be(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for something is served; those who only hold a connection make room."""
    monkeypatch.setattr(serving, "CONNECTIONS", 20)
    held = [socket.create_connection(("127.0.0.1", rig.port), 30) for _ in range(200)]
    try:
        assert rig.client.health()["status"] == "ok"
        assert rig.client.runs(limit=1)["runs"] == []
        deadline = time.monotonic() + 30
        left = list(held)
        while len(left) > 20:
            assert time.monotonic() < deadline
            left = [sock for sock in left if not gone(sock)]
    finally:
        for sock in held:
            sock.close()


def gone(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "environment", [["x"], 7, {"A": 1}, {"A": None}, {"": "x"}, {"A=B": "x"}, {"A": "x\0y"}, {"A": "\ud800"}]
)
def test_an_environment_that_no_process_can_have(rig: Any, environment: Any) -> None:
    body = {"key": "k", "job": {"run": ["true"]}, "record": {"environment": environment}}
    status, _, _ = rig.raw(
        "POST", "/api/v1/runs", {"Content-Type": "application/json"}, json.dumps(body).encode()
    )
    assert status == 422


def test_a_home_that_others_may_enter_shows_them_nothing(tmp_path: Any) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir(mode=0o755)
    home.runs.mkdir(mode=0o755)
    home.ledger.touch(mode=0o644)
    old = os.umask(0o022)
    try:
        startup.prepare(home)
    finally:
        os.umask(old)
    for path in home.root.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path
