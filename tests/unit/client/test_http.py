"""The small HTTP client against servers that misbehave."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from stoker.client import Client
from stoker.client.http import Address
from stoker.errors import NotFound, ServerUnreachable, SpecError, StokerError


class Scripted:
    """A server that answers the requests of each connection with prepared bytes."""

    def __init__(self, *answers: bytes, close: bool = False) -> None:
        self._answers = list(answers)
        self._close = close
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.requests: list[bytes] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._answers:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with sock:
                while self._answers:
                    head = b""
                    while b"\r\n\r\n" not in head and (data := sock.recv(65536)):
                        head += data
                    if not head:
                        break
                    self.requests.append(head)
                    sock.sendall(self._answers.pop(0))
                    if self._close:
                        break

    def stop(self) -> None:
        self._answers.clear()
        self._listener.close()
        self._thread.join(10)


@pytest.fixture
def scripted() -> Iterator[Callable[..., Scripted]]:
    made: list[Scripted] = []

    def make(*answers: bytes, close: bool = False) -> Scripted:
        made.append(Scripted(*answers, close=close))
        return made[-1]

    yield make
    for server in made:
        server.stop()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def test_connections_are_kept(scripted: Callable[..., Scripted]) -> None:
    server = scripted(OK, OK, OK)
    with Client(server.url, "secret") as client:
        for _ in range(3):
            assert client.health() == {}
    assert server.connections == 1
    assert b"Authorization: Bearer secret\r\n" in server.requests[0]


def test_a_closed_connection_is_replaced(scripted: Callable[..., Scripted]) -> None:
    server = scripted(OK, OK, close=True)
    with Client(server.url, "t") as client:
        assert client.health() == client.health() == {}
    assert server.connections == 2


def test_chunks_and_lines(scripted: Callable[..., Scripted]) -> None:
    body = b'6\r\n{"a":1\r\n4\r\n}\n\n{\r\n8\r\n"b": 2}\n\r\n0\r\n\r\n'
    server = scripted(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body, OK)
    with Client(server.url, "t") as client:
        assert list(client.logs("run")) == [{"a": 1}, {"b": 2}]
        assert client.health() == {}
    assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\nnot a header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1000,
    ],
)
def test_answers_that_break_off(scripted: Callable[..., Scripted], answer: bytes) -> None:
    server = scripted(answer, close=True)
    with Client(server.url, "t") as client, pytest.raises(ServerUnreachable, match=server.url) as caught:
        client.health()
    assert caught.value.hint


def test_answers_of_other_programs(scripted: Callable[..., Scripted]) -> None:
    page = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 6\r\n\r\n<html>"
    listed = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"
    server = scripted(page, listed)
    with Client(server.url, "t") as client:
        with pytest.raises(StokerError, match="status 502"):
            client.health()
        with pytest.raises(StokerError, match="not Stoker's"):
            client.health()


def test_errors_are_rebuilt(scripted: Callable[..., Scripted]) -> None:
    body = b'{"error": {"code": "not-found", "message": "no run", "hint": "look", "details": {"a": 1}}}'
    server = scripted(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    with Client(server.url, "t") as client, pytest.raises(NotFound) as caught:
        client.run("x")
    assert (caught.value.message, caught.value.hint, caught.value.details) == ("no run", "look", {"a": 1})


def test_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (
        Client(f"http://127.0.0.1:{port}", "t") as client,
        pytest.raises(ServerUnreachable, match="no server listens"),
    ):
        client.health()


def test_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with Client(url, "t", timeout=0.2) as client, pytest.raises(ServerUnreachable, match="in time"):
            client.health()


def test_a_post_is_not_sent_twice(scripted: Callable[..., Scripted]) -> None:
    server = scripted(OK, b"", close=False)
    with Client(server.url, "t") as client:
        client.health()
        with pytest.raises(ServerUnreachable):
            client.stop("x")
    assert [request.split()[0] for request in server.requests] == [b"GET", b"POST"]


def test_names_are_quoted(scripted: Callable[..., Scripted]) -> None:
    server = scripted(OK)
    with Client(server.url, "t") as client:
        client.run("a/../b\r\nX: y")
    assert server.requests[0].startswith(b"GET /api/v1/runs/a%2F..%2Fb%0D%0AX%3A%20y HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "url", ["", "localhost:1", "ftp://x", "http://", "http://x:y", "http://x:99999", "http://u:p@x"]
)
def test_invalid_urls(url: str) -> None:
    with pytest.raises(SpecError):
        Client(url, "t")


def test_addresses() -> None:
    address = Address("https://stoker.example/base/")
    assert (address.host, address.port, address.secure, address.base) == (
        "stoker.example",
        443,
        True,
        "/base",
    )
    assert Address("http://[::1]:80").netloc == "[::1]:80"


def test_importing_the_client_is_cheap() -> None:
    """Every command pays for these imports before its first output."""
    program = (
        "import sys; import stoker.client, stoker.client.local\n"
        "heavy = ['ssl', 'http.client', 'email', 'pydantic', 'dataclasses', 'subprocess', 'asyncio', 'pathspec', 'tomllib', 'fastapi']\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{program}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[]\n"
