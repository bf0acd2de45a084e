"""Requests with and without the key at a courier: real sockets, real TLS, one process."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.courier import server as server_module
from stoker.courier.handlers import Handlers
from stoker.courier.server import MAX_UNTRUSTED, CourierServer, listen
from stoker.engine.kubernetes.manifests import credentials
from stoker.task import courier_protocol, formats, layout
from stoker.task.local_directory import LocalTaskDir

MADE = credentials.make()
KEY = MADE.courier


class Door:
    def __init__(self, tmp_path: Path) -> None:
        (tmp_path / "crt").write_bytes(MADE.cert)
        (tmp_path / "key").write_bytes(MADE.private)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "crt", tmp_path / "key")
        self.root = tmp_path / "task"
        self.root.mkdir()
        self.touched = 0
        self._over = threading.Event()
        self._listener = listen(0, "127.0.0.1")
        self.server = CourierServer(
            self._listener, context, KEY, Handlers(str(self.root), job_wait=0.2), self._touch
        )
        self._thread = threading.Thread(target=self.server.serve, args=(self._over.is_set,))
        self._thread.start()

    def _touch(self) -> None:
        self.touched += 1

    def connect(self) -> Talk:
        return self.introduce(self.plain())

    def introduce(self, raw: socket.socket) -> Talk:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return Talk(context.wrap_socket(raw))

    def plain(self, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(self._listener.getsockname(), 20, source_address=(source, 0))

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._listener.close()


class Talk:
    """One connection."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.sock = sock
        self.boot = courier_protocol.UNKNOWN_BOOT

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()

    def raw(self, data: bytes) -> bytes:
        """All bytes until the other side closes or has answered."""
        self.sock.sendall(data)
        return self.receive()

    def receive(self) -> bytes:
        got = b""
        while b"\r\n\r\n" not in got:
            more = self.sock.recv(65536)
            if not more:
                return got
            got += more
        head, _, body = got.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        while len(body) < length:
            body += self.sock.recv(65536)
        return head + b"\r\n\r\n" + body

    def request(self, path: str, body: bytes, *, key: bytes = KEY, nonce: str | None = None) -> bytes:
        header = courier_protocol.sign_request(
            key, "POST", path, nonce or courier_protocol.new_nonce(), self.boot, body
        )
        return post(path, body, header)

    def ask(
        self, path: str, header: dict[str, object], data: bytes = b""
    ) -> tuple[int, dict[str, object], bytes]:
        """As a server: the answer is verified, and a new boot id is learned."""
        for _ in range(2):
            nonce = courier_protocol.new_nonce()
            answer = self.raw(self.request(path, courier_protocol.pack(header, data), nonce=nonce))
            status, session, body = parse(answer)
            courier_protocol.check_answer(KEY, nonce, status, session, body)
            found, rest = courier_protocol.unpack(body)
            if status != 409:
                return status, found, bytes(rest)
            self.boot = found["boot"]
        raise AssertionError("it restarts again and again")


def post(path: str, body: bytes, session: str, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Content-Length: {len(body)}", f"Stoker-Session: {session}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def parse(answer: bytes) -> tuple[int, str, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    sessions = [line.partition(":")[2].strip() for line in lines if line.startswith("Stoker-Session:")]
    return int(lines[0].split()[1]), (sessions or [""])[0], body


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setattr(server_module, "TICK", 0.02)
    made = Door(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_health_needs_no_key_and_tells_nothing(door: Door) -> None:
    with door.connect() as talk:
        status, session, body = parse(talk.raw(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"))
        assert (status, session, body) == (200, "", b"ok")
    assert door.touched == 0


def test_an_order_arrives(door: Door) -> None:
    order = formats.Order(seq=1, generation=1, verb="run")
    with door.connect() as talk:
        assert talk.ask(courier_protocol.ORDER, {"order": order.to_json()})[0] == 200
    assert LocalTaskDir(str(door.root)).order() == order
    assert door.touched == 1


def test_a_delayed_order_does_not_replace_a_later_one(door: Door) -> None:
    near = LocalTaskDir(str(door.root))
    with door.connect() as talk:
        for seq in (2, 1, 2):
            talk.ask(
                courier_protocol.ORDER, {"order": formats.Order(seq=seq, generation=1, verb="stop").to_json()}
            )
            order = near.order()
            assert order is not None and order.seq == 2
        assert talk.ask(courier_protocol.ORDER, {"order": {"seq": "x"}})[0] == 400


@pytest.mark.parametrize(
    "path",
    [
        courier_protocol.SYNC,
        courier_protocol.ORDER,
        courier_protocol.READ,
        courier_protocol.PLACE,
        "/",
        "/v1/unknown",
        "/healthz",
    ],
)
def test_nobody_without_the_key_hears_anything(door: Door, path: str) -> None:
    body = courier_protocol.pack({})
    other = bytes(32)
    for session in (
        "",
        "1 2 3 4 5",
        courier_protocol.sign_request(other, "POST", path, "a" * 32, door.server._guard.boot, body),
    ):
        with door.connect() as talk:
            status, signed, said = parse(talk.raw(post(path, body, session)))
            assert (status, signed, said) == (403, "", b"")
            assert talk.sock.recv(100) == b"", "and the connection is closed"
    assert door.touched == 0


def test_a_repeated_request_is_not_obeyed_again(door: Door) -> None:
    order = formats.Order(seq=5, generation=1, verb="stop").to_json()
    with door.connect() as talk:
        talk.ask(courier_protocol.DISCARD, {"path": "nothing"})
        recorded = talk.request(courier_protocol.ORDER, courier_protocol.pack({"order": order}))
        assert parse(talk.raw(recorded))[0] == 200
        (door.root / layout.ORDER).unlink()
        assert parse(talk.raw(recorded))[0] == 409
    with door.connect() as talk:
        assert parse(talk.raw(recorded))[0] == 409
    assert not (door.root / layout.ORDER).exists()


def test_a_changed_body_is_refused(door: Door) -> None:
    with door.connect() as talk:
        talk.ask(courier_protocol.DISCARD, {"path": "nothing"})
        request = talk.request(courier_protocol.DISCARD, courier_protocol.pack({"path": "precious"}))
        (door.root / "precious").write_bytes(b"")
        (door.root / "precioux").write_bytes(b"")
        assert parse(talk.raw(request.replace(b"precious", b"precioux")))[0] == 403
    assert (door.root / "precious").exists() and (door.root / "precioux").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/2\r\n\r\n",
        b"POST /v1/sync HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/sync HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST http://elsewhere/ HTTP/1.1\r\n\r\n",
        b"\r\n\r\n",
        b"A" * 40_000,
    ],
)
def test_a_connection_without_http_is_closed(door: Door, data: bytes) -> None:
    with door.connect() as talk:
        try:
            assert talk.raw(data) == b""
        except OSError:
            pass  # closed before everything was sent
    with door.connect() as talk:
        assert talk.ask(courier_protocol.DISCARD, {"path": "x"})[0] == 200


@pytest.mark.parametrize("length", ["-1", "9" * 12, "9" * 30, "1e3", "", str(courier_protocol.MAX_BODY + 1)])
def test_bodies_have_a_length_and_a_limit(door: Door, length: str) -> None:
    session = courier_protocol.sign_request(
        KEY, "POST", courier_protocol.SYNC, "a" * 32, door.server._guard.boot, b""
    )
    head = f"POST {courier_protocol.SYNC} HTTP/1.1\r\nContent-Length: {length}\r\nStoker-Session: {session}\r\n\r\n"
    with door.connect() as talk:
        answer = talk.raw(head.encode())
        assert not answer or parse(answer)[0] in (400, 403, 413)
    assert door.touched == 0


def test_an_incomplete_body_is_no_request(door: Door) -> None:
    with door.connect() as talk:
        talk.ask(courier_protocol.DISCARD, {"path": "nothing"})
        request = talk.request(courier_protocol.DISCARD, courier_protocol.pack({"path": "x"}))
        talk.sock.sendall(request[:-3])
    while door.server._connections:
        time.sleep(0.01)
    assert door.touched == 1


def test_clients_without_the_key_do_not_block_those_with_it(door: Door) -> None:
    with door.connect() as friend:
        assert friend.ask(courier_protocol.DISCARD, {"path": "x"})[0] == 200
        strangers = [door.plain() for _ in range(3 * MAX_UNTRUSTED)]
        try:
            assert friend.ask(courier_protocol.DISCARD, {"path": "x"})[0] == 200
            with door.connect() as another:
                assert another.ask(courier_protocol.DISCARD, {"path": "x"})[0] == 200
            # The oldest connections without the key were closed.
            strangers[0].settimeout(20)
            assert strangers[0].recv(1) == b""
            assert len(door.server._connections) <= MAX_UNTRUSTED + 2
        finally:
            for stranger in strangers:
                stranger.close()


def test_one_that_knocks_without_end_is_in_its_own_way(door: Door) -> None:
    """A client with the key needs a moment to introduce itself, while dozens of others may connect."""
    raw = door.plain()
    strangers = [door.plain("127.0.0.2") for _ in range(5 * MAX_UNTRUSTED)]
    try:
        for stranger in strangers[: 4 * MAX_UNTRUSTED]:
            stranger.settimeout(20)
            assert stranger.recv(1) == b""
        with door.introduce(raw) as friend:
            assert friend.ask(courier_protocol.DISCARD, {"path": "x"})[0] == 200
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_copied_head_is_no_way_to_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signature is valid, so the timeout counts for the whole body and not for each byte."""
    monkeypatch.setattr(server_module, "IDLE", 0.3)
    door = Door(tmp_path)
    try:
        with door.connect() as talk:
            head = talk.request(courier_protocol.DISCARD, b"x" * 1_000_000).partition(b"\r\n\r\n")[0]
            talk.sock.sendall(head + b"\r\n\r\n")
            with pytest.raises(OSError):
                while True:
                    talk.sock.sendall(b"x")
                    time.sleep(0.05)
        assert door.touched == 0
    finally:
        door.close()


def test_a_silent_connection_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "KEY_TIMEOUT", 0.2)
    door = Door(tmp_path)
    try:
        with door.plain() as silent, door.connect() as slow:
            assert silent.recv(1) == b""
            slow.sock.settimeout(20)
            with pytest.raises(OSError):
                while True:  # sending a byte now and then does not help
                    slow.sock.sendall(b"G")
                    time.sleep(0.05)
    finally:
        door.close()


def test_a_pod_without_room_for_a_thread(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training that forks without end uses up the pod's limit, which its courier shares."""

    def full(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with door.connect() as friend:
        friend.ask(courier_protocol.DISCARD, {"path": "x"})
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", full)
            with door.plain() as stranger:
                stranger.settimeout(20)
                assert stranger.recv(1) == b""
            walk = {"path": "output", "after": "", "max_entries": 10, "job": "j"}
            assert friend.ask(courier_protocol.WALK, walk)[0] == 503
        assert friend.ask(courier_protocol.WALK, walk)[0] == 200


def test_errors_are_reported_and_signed(door: Door) -> None:
    (door.root / "link").symlink_to("/etc/passwd")
    with door.connect() as talk:
        status, said, _ = talk.ask(courier_protocol.READ, {"path": "nothing", "offset": 0, "limit": 10})
        assert (status, said["errno"]) == (422, 2)
        status, said, _ = talk.ask(courier_protocol.READ, {"path": "link", "offset": 0, "limit": 10})
        assert (status, said["unsafe"]) == (422, True)
        assert talk.ask(courier_protocol.READ, {"path": 7})[0] == 400
        assert talk.ask(courier_protocol.READ, {"path": "x", "offset": -1, "limit": 1})[0] == 400
        assert talk.ask("/v1/unknown", {})[0] == 404
        assert (
            talk.ask(courier_protocol.MISSING, {"path": "code", "manifest": "short", "digests": []})[0] == 400
        )
        assert (
            talk.ask(
                courier_protocol.BLOB,
                {"path": "code", "manifest": "0" * 64, "pieces": [["0" * 64, 1, 0, 2]]},
                b"xx",
            )[0]
            == 400
        )
        assert talk.ask(courier_protocol.DISCARD, {"path": ".."})[0] == 422
        assert talk.ask(courier_protocol.DISCARD, {"path": ".courier"})[0] == 422


def test_ranges_of_a_file(door: Door) -> None:
    data = bytes(range(256)) * 40_000
    (door.root / "file").write_bytes(data)
    with door.connect() as talk:
        for offset, limit in (
            (0, 10),
            (5, 1 << 30),
            (len(data) - 3, 100),
            (len(data), 5),
            (len(data) + 10, 5),
        ):
            status, header, got = talk.ask(
                courier_protocol.READ, {"path": "file", "offset": offset, "limit": limit}
            )
            assert status == 200 and header["size"] == len(data)
            assert got == data[offset : offset + min(limit, courier_protocol.RANGE)]
