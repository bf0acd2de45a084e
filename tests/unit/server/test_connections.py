"""Connections that are only held open. Any user of the machine can open them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from stoker.client import Client
from stoker.server import startup
from stoker.server.connections import Connections, Limits
from stoker.settings import Home
from support.waiting import wait

TOKEN = "the-token-of-this-test-server-0123456789"


def closed(sock: socket.socket) -> bool:
    """Whether the other side has closed; waits for it."""
    sock.settimeout(30)
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def answer(sock: socket.socket) -> bytes:
    """All bytes until the other side closes."""
    sock.settimeout(30)
    said = b""
    with contextlib.suppress(ConnectionError):
        while more := sock.recv(65536):
            said += more
    return said


@pytest.fixture
def reach(rig: Any) -> Iterator[Callable[..., socket.socket]]:
    """Connections that have sent these bytes; they end with the test."""
    with contextlib.ExitStack() as stack:

        def connect(said: str | bytes = b"", to: Any = None) -> socket.socket:
            port = (to or rig).port
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            data = (
                said if isinstance(said, bytes) else said.replace("HOST", f"Host: 127.0.0.1:{port}").encode()
            )
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
            return sock

        yield connect


KEY = f"Authorization: Bearer {TOKEN}\r\n"
HEALTH = "GET /healthz HTTP/1.1\r\nHOST\r\n\r\n"
ENDLESS = "POST /api/v1/runs HTTP/1.1\r\nHOST\r\nTransfer-Encoding: chunked\r\n"


@pytest.mark.parametrize("said", ["", "GET /heal", "GET /healthz HTTP/1.1\r\nHost: x\r\n"])
def test_headers_that_never_end_are_not_waited_for(serve: Any, reach: Any, said: str) -> None:
    rig = serve(limits=Limits(head_seconds=0.2))
    assert closed(reach(said, rig))
    assert rig.client.health()["status"] == "ok"


def test_a_slow_second_request_times_out(serve: Any, reach: Any) -> None:
    rig = serve(limits=Limits(head_seconds=0.2))
    sock = reach(f"GET /healthz HTTP/1.1\r\nHOST\r\n{KEY}\r\n", rig)
    assert sock.recv(4096).split()[1] == b"200"
    sock.sendall(b"GET /heal")
    answer(sock)


def test_strangers_have_one_answer_and_no_place(reach: Any) -> None:
    """Routes without a token cannot hold a connection either."""
    assert answer(reach(HEALTH)).startswith(b"HTTP/1.1 200")
    assert answer(reach(ENDLESS + "\r\n5\r\nhello\r\n")).startswith(b"HTTP/1.1 401")


def test_a_client_that_still_sends_can_read_the_refusal(rig: Any, reach: Any) -> None:
    """A socket closed with unread input resets the connection, and the answer is lost."""
    sock = reach("POST /api/v1/code/blobs HTTP/1.1\r\nHOST\r\nContent-Length: 2000000\r\n\r\n")
    for _ in range(40):
        sock.sendall(b"x" * 50_000)
    assert answer(sock).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    "said",
    [
        b"GET /" + b"x" * 40_000,
        b"GET / HTTP/1.1\r\nA: " + b"x" * 40_000,
        b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 200,
    ],
    ids=["url", "value", "count"],
)
def test_a_head_has_a_size(shared: Any, reach: Any, said: bytes) -> None:
    """In bytes and in number of headers: one of four bytes costs fifty times as much memory."""
    assert answer(reach(said, shared)).startswith(b"HTTP/1.1 431")


def test_a_large_body_does_not_count_as_head(shared: Any, reach: Any) -> None:
    body = json.dumps({"key": "k", "job": {"name": "x" * 200_000}}).encode()
    head = f"POST /api/v1/runs/check HTTP/1.1\r\nHost: 127.0.0.1:{shared.port}\r\n{KEY}Connection: close\r\n"
    said = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    assert answer(reach(said, shared)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("key", ["", KEY], ids=["stranger", "known"])
def test_of_requests_sent_at_once_only_the_first_is_answered(rig: Any, reach: Any, key: str) -> None:
    """Thousands of requests fit into one read, and each would cost a task and its headers."""
    said = answer(reach(HEALTH.replace("\r\n\r\n", f"\r\n{key}\r\n") * 3000))
    assert said.count(b"HTTP/1.1 200") == 1 == said.count(b"HTTP/1.1 ")


def test_strangers_by_the_hundred_do_not_keep_the_owner_out(serve: Any, reach: Any) -> None:
    rig = serve(limits=Limits(unauthenticated=5, burst=10, known=20, min_age=0.02))
    run = rig.submit()["id"]
    follower = reach(f"GET /api/v1/runs/{run}/logs?follow=1 HTTP/1.1\r\nHOST\r\n{KEY}\r\n", rig)
    assert follower.recv(4096).startswith(b"HTTP/1.1 200")
    upload = reach(f"{ENDLESS}Content-Type: application/json\r\n{KEY}\r\n", rig)
    held = []
    for number in range(10):
        held += [reach(said, rig) for said in ("", "GET /heal", f"{ENDLESS}\r\n5\r\nhello\r\n") * 20]
        with Client(rig.services.url, TOKEN) as owner:
            assert owner.runs(limit=1)["runs"][0]["id"] == run, number
    wait(lambda: sum(not gone(sock) for sock in held) <= 5)
    body = json.dumps({"key": "late", "job": {"name": "late"}}).encode()
    upload.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    assert upload.recv(4096).split()[1] in (b"200", b"201")
    rig.log(run, "still here")
    assert b"still here" in follower.recv(4096)


def test_more_connections_than_there_may_be(serve: Any, reach: Any) -> None:
    """An authenticated connection without a current request makes room."""
    rig = serve(limits=Limits(known=20))
    asked = f"GET /healthz HTTP/1.1\r\nHOST\r\n{KEY}\r\n"
    held = []
    for _ in range(60):
        held.append(reach(asked, rig))
        assert held[-1].recv(4096).startswith(b"HTTP/1.1 200")
    wait(lambda: sum(not gone(sock) for sock in held) <= 20)
    assert not gone(held[-1])


def test_a_body_that_comes_to_a_halt(serve: Any, reach: Any) -> None:
    rig = serve(limits=Limits(body_seconds=0.2))
    assert closed(reach(f"{ENDLESS}{KEY}\r\n5\r\nhello\r\n", rig))


def gone(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
        return True
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


# -- closed first -------------------------------------------------------------------------------------------------


class Clock:
    """The part of an event loop that the limits use."""

    def __init__(self) -> None:
        self.at = 0.0
        self.due: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def time(self) -> float:
        return self.at

    def call_later(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self.due.append((self.at + seconds, call, arguments))

    def pass_by(self, seconds: float) -> None:
        self.at += seconds
        now, self.due = self.due, []
        for at, call, arguments in now:
            if at <= self.at:
                call(*arguments)
            else:
                self.due.append((at, call, arguments))


class Visitor:
    def __init__(self, door: Connections, clock: Clock, peer: str, *, idle: bool = False) -> None:
        self.loop, self.since, self.peer, self.idle, self.dropped = clock, clock.at, peer, idle, False
        door.admit(self)  # type: ignore[arg-type]

    def abort(self) -> None:
        self.dropped = True


def door_of(**limits: Any) -> tuple[Connections, Clock]:
    return Connections(lambda headers: False, replace(Limits(), **limits)), Clock()


def test_the_oldest_of_the_address_with_most_goes_first() -> None:
    door, clock = door_of(unauthenticated=4, burst=100, min_age=1.0)
    alone = Visitor(door, clock, "10.0.0.9")
    clock.pass_by(2)
    many = []
    for _ in range(6):
        many.append(Visitor(door, clock, "10.0.0.1"))
        clock.pass_by(2)
    assert not alone.dropped and [one.dropped for one in many] == [True] * 3 + [False] * 3


def test_a_connection_has_a_moment_to_speak_before_it_goes() -> None:
    """A server accepts all waiting connections before it reads from the first one."""
    door, clock = door_of(unauthenticated=4, burst=50, min_age=1.0)
    owner = Visitor(door, clock, "127.0.0.1")
    flood = [Visitor(door, clock, "127.0.0.1") for _ in range(40)]
    clock.pass_by(0.5)
    assert not owner.dropped
    door.mark_authenticated(owner)  # type: ignore[arg-type]
    clock.pass_by(0.5)
    assert not owner.dropped and sum(one.dropped for one in flood) == 36
    flood += [Visitor(door, clock, "127.0.0.1") for _ in range(1000)]
    assert sum(not one.dropped for one in flood) == 50 and not owner.dropped
    for one in flood:
        door.leave(one)  # type: ignore[arg-type]
    clock.pass_by(5)
    assert clock.due == []


def test_of_authenticated_connections_only_idle_ones_make_room() -> None:
    door, clock = door_of(known=3)
    busy, first, second, new = (
        Visitor(door, clock, "127.0.0.1", idle=idle) for idle in (False, True, True, False)
    )
    for one in (busy, first, second, first, new):
        door.mark_authenticated(one)  # type: ignore[arg-type]
    assert [one.dropped for one in (busy, first, second, new)] == [False, False, True, False]


def test_descriptors_are_left_for_the_servers_work() -> None:
    for soft in (64, 256, 1024, 4096, 65536):
        limits = Limits().within(soft)
        assert (
            limits.known + limits.burst <= soft * 3 // 4
            and limits.unauthenticated >= 1
            and limits.head == Limits().head
        )


@pytest.mark.parametrize(
    "environment", [["x"], 7, {"A": 1}, {"A": None}, {"": "x"}, {"A=B": "x"}, {"A": "x\0y"}, {"A": "\ud800"}]
)
def test_an_environment_too_large_for_a_process(rig: Any, environment: Any) -> None:
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
