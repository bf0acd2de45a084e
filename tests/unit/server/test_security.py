"""No route answers a client without a token, and input from such a client costs little."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.settings import Home, ServerSettings, Settings

DOCS = Path(__file__).parents[3] / "docs" / "api.md"
NO_TOKEN = {"Authorization": ""}


def routes(app: Any) -> Iterator[tuple[str, str]]:
    """(method, path) of every route at any depth; an unknown kind of route fails the test."""
    waiting = list(app.routes)
    while waiting:
        route = waiting.pop()
        if hasattr(route, "methods") and hasattr(route, "path"):
            for method in sorted(route.methods - {"HEAD"}):
                yield method, route.path
        else:
            inner = getattr(route, "original_router", None) or getattr(route, "router", None)
            assert inner is not None, f"what is {route!r}?"
            waiting.extend(inner.routes)


def filled(path: str) -> str:
    return re.sub(r"\{[^}]+\}", "x", path)


def test_there_are_routes_to_walk(shared: Any) -> None:
    assert len(list(routes(shared.app))) >= 20


def test_every_route_refuses_strangers(rig: Any) -> None:
    refusals = [
        (NO_TOKEN, (401, 429)),
        ({"Authorization": "Bearer wrong"}, (401, 429)),
        ({"Authorization": "Basic dXNlcjpwYXNz"}, (401, 429)),
        ({"Host": "evil.example"}, (421,)),
        ({"Host": f"evil.example:{rig.port}"}, (421,)),
        ({"Origin": "https://evil.example"}, (403,)),
        ({"Origin": "null"}, (403,)),
        ({"Origin": "http://127.0.0.1:1"}, (403,)),
        ({"Sec-Fetch-Site": "cross-site"}, (403,)),
        ({"Sec-Fetch-Site": "same-site"}, (403,)),
    ]
    for method, path in routes(rig.app):
        for headers, expected in refusals:
            if path in ("/healthz", "/readyz") and "Authorization" in headers:
                continue
            status, sent, body = rig.raw(method, filled(path), headers)
            assert status in expected, (method, path, headers, status)
            assert json.loads(body)["error"]["code"] == "unauthorized"
            assert "access-control-allow-origin" not in sent
            assert rig.client._token.encode() not in body


@pytest.mark.parametrize(
    "path", ["/nothing", "/docs", "/redoc", "/openapi.json", "/metrics", "/", "/api/v1/runs/", "//healthz"]
)
def test_what_is_no_route_is_not_shown_to_strangers(shared: Any, path: str) -> None:
    assert shared.raw("GET", path, NO_TOKEN)[0] in (401, 429)
    status, _, body = shared.raw("GET", path)
    assert status == 404 and json.loads(body)["error"]["code"] == "not-found"


def test_health_needs_no_token_but_our_host_name(shared: Any) -> None:
    status, _, body = shared.raw("GET", "/healthz", NO_TOKEN)
    assert (status, json.loads(body)) == (200, {"status": "ok", "home_id": "test"})
    status, _, body = shared.raw("GET", "/readyz", NO_TOKEN)
    assert (status, json.loads(body)) == (200, {"status": "ready"})
    assert shared.raw("POST", "/healthz", NO_TOKEN)[0] == 401
    assert shared.raw("GET", "/healthz", {**NO_TOKEN, "Host": "rebound.example"})[0] == 421


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_loopback_names_with_our_port(shared: Any, name: str) -> None:
    own = {"Host": f"{name}:{shared.port}"}
    assert shared.raw("GET", "/api/v1/server", own)[0] == 200
    assert shared.raw("GET", "/api/v1/server", {"Host": f"{name}:{shared.port + 1}"})[0] == 421
    assert shared.raw("GET", "/api/v1/server", {"Host": name})[0] == 421
    assert shared.raw("GET", "/api/v1/server", {**own, "Origin": f"http://{name}:{shared.port}"})[0] == 200
    assert shared.raw("GET", "/api/v1/server", {**own, "Sec-Fetch-Site": "same-origin"})[0] == 200


@pytest.mark.parametrize(
    "host", ["", "127.0.0.1:x", "[::1", "127.0.0.1:80:80", "127.0.0.1.evil.example", "a@127.0.0.1"]
)
def test_hosts_that_are_none(shared: Any, host: str) -> None:
    assert shared.raw("GET", "/healthz", {"Host": host})[0] in (400, 421)


def test_two_hosts_or_two_tokens_are_refused(shared: Any) -> None:
    for doubled in (f"Host: 127.0.0.1:{shared.port}", f"Authorization: Bearer {shared.client._token}"):
        lines = [
            "GET /api/v1/server HTTP/1.1",
            f"Host: 127.0.0.1:{shared.port}",
            f"Authorization: Bearer {shared.client._token}",
        ]
        with socket.create_connection(("127.0.0.1", shared.port), 10) as sock:
            sock.sendall("\r\n".join([*lines, doubled, "Connection: close", "", ""]).encode())
            assert sock.recv(100).split()[1] in (b"400", b"401", b"421")


def test_names_an_operator_allows(serve: Callable[..., Any], tmp_path: Path) -> None:
    settings = Settings(
        home=Home(tmp_path / "home0"), server=ServerSettings(allowed_hosts=("stoker.example",))
    )
    rig = serve(settings)
    assert rig.raw("GET", "/api/v1/server", {"Host": "stoker.example"})[0] == 200
    assert rig.raw("GET", "/api/v1/server", {"Host": "other.example"})[0] == 421


def test_headers_on_every_answer(shared: Any) -> None:
    for path, headers in [
        ("/healthz", {}),
        ("/api/v1/runs", NO_TOKEN),
        ("/nothing", {}),
        ("/api/v1/runs?limit=x", {}),
    ]:
        _, sent, _ = shared.raw("GET", path, headers)
        assert sent["content-security-policy"].startswith("default-src 'none'")
        assert sent["x-content-type-options"] == "nosniff"
        assert sent["cache-control"] == "no-store"
        assert sent["referrer-policy"] == "no-referrer"
        assert "server" not in sent


def test_guessing_is_slowed_down_and_locks_nobody_out(rig: Any) -> None:
    answers = {rig.raw("GET", "/api/v1/server", {"Authorization": f"Bearer {n}"})[0] for n in range(60)}
    assert answers == {401, 429}
    assert rig.raw("GET", "/api/v1/server")[0] == 200


def test_a_websocket_is_refused(shared: Any) -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "eA==",
    }
    assert shared.raw("GET", "/api/v1/runs", {**NO_TOKEN, **upgrade})[0] == 401
    assert shared.raw("GET", "/api/v1/runs", upgrade)[0] != 101


def test_the_documented_routes_are_the_routes(shared: Any) -> None:
    documented = set(
        re.findall(r"^\| `(GET|POST|PUT|DELETE|PATCH) (/[^` ]*)` \|", DOCS.read_text(), re.MULTILINE)
    )
    assert documented == {(method, path.replace(":path}", "}")) for method, path in routes(shared.app)}


# -- request bodies ---------------------------------------------------------------------------------------------


def test_large_bodies_are_refused_before_they_are_read(shared: Any) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), 30) as sock:
        head = f"POST /api/v1/runs HTTP/1.1\r\nHost: 127.0.0.1:{shared.port}\r\nAuthorization: Bearer {shared.client._token}\r\n"
        sock.sendall(f"{head}Content-Length: 99999999999\r\n\r\n".encode())
        assert sock.recv(100).split()[1] == b"413"


@pytest.mark.parametrize(
    "start", [b"GET /" + b"x" * 1000, b"GET /healthz HTTP/1.1\r\nA: ", b"GET /healthz HTTP/1.1\r\n"]
)
def test_endless_headers_are_cut_off(shared: Any, start: bytes) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), 30) as sock:
        sock.sendall(start)
        with pytest.raises(OSError):
            for n in range(500):
                sock.sendall(b"B%d: " % n + b"x" * 65536 + (b"\r\n" if start.endswith(b"\n") else b""))
    assert shared.client.health()["status"] == "ok"


def test_endless_bodies_are_cut_off(rig: Any) -> None:
    with socket.create_connection(("127.0.0.1", rig.port), 30) as sock:
        head = f"POST /api/v1/runs HTTP/1.1\r\nHost: 127.0.0.1:{rig.port}\r\nAuthorization: Bearer {rig.client._token}\r\n"
        sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
        try:
            for _ in range(200):
                sock.sendall(piece)
        except OSError:
            pass
        assert sock.recv(100).split()[1] == b"413"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b"[" * 100_000,
        b'{"key": ' * 20_000,
        b"\xff\xfe",
        b'{"key": "k", "job": 1}',
        b'{"key": "k\\n", "job": {}}',
        b'{"key": "", "job": {}}',
        b'{"key": "k", "job": {}, "code": "../etc"}',
        b'{"key": "k", "job": {}, "secrets": {"a b": "x"}}',
        b'{"key": "k", "job": {}, "secrets": {"A": 1}}',
    ],
)
def test_invalid_bodies(shared: Any, body: bytes) -> None:
    for path in ("/api/v1/runs", "/api/v1/runs/check"):
        status, _, answer = shared.raw("POST", path, {"Content-Type": "application/json"}, body)
        assert status in (400, 422), answer
        assert json.loads(answer)["error"]["code"] == "spec"
    assert shared.client.runs()["runs"] == []


@pytest.mark.parametrize("extra", ["id", "owner", "is_admin", "user", "state", "seq"])
def test_what_only_the_server_decides_cannot_be_sent(shared: Any, extra: str) -> None:
    run = shared.submit()
    for path, body in [
        ("/api/v1/runs", {"key": "k", "job": {}}),
        (f"/api/v1/runs/{run['id']}/stop", {}),
        (f"/api/v1/runs/{run['id']}/resume", {"key": "k"}),
        ("/api/v1/backups", {}),
        ("/api/v1/shutdown", {}),
    ]:
        status, _, answer = shared.raw(
            "POST", path, {"Content-Type": "application/json"}, json.dumps({**body, extra: "x"}).encode()
        )
        assert status == 422 and extra in json.loads(answer)["error"]["message"]


def test_a_refused_body_is_not_quoted(shared: Any) -> None:
    body = {"key": "k", "job": {}, "secrets": {"HF": ["hunter2-hunter2"]}}
    _, _, answer = shared.raw(
        "POST", "/api/v1/runs", {"Content-Type": "application/json"}, json.dumps(body).encode()
    )
    assert b"hunter2" not in answer and b"HF" in answer


def test_an_unexpected_error_is_logged_and_not_sent(rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig.controller.error = RuntimeError("inner workings: hunter2-hunter2")
    with caplog.at_level(logging.ERROR):
        status, sent, answer = rig.raw(
            "POST",
            "/api/v1/runs",
            {"Content-Type": "application/json"},
            b'{"key": "k", "job": {"name": "x"}}',
        )
    error = json.loads(answer)["error"]
    assert status == 500 and "inner" not in answer.decode() and sent["x-content-type-options"] == "nosniff"
    assert error["details"]["id"] in caplog.text and "inner workings" in caplog.text


def test_a_client_that_disconnects_is_no_error(rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    head = f"Host: 127.0.0.1:{rig.port}\r\nAuthorization: Bearer {rig.client._token}\r\n"
    for path in ("/api/v1/runs", "/api/v1/code/trees", "/api/v1/code/blobs"):
        with socket.create_connection(("127.0.0.1", rig.port), 10) as sock:
            sock.sendall(f"POST {path} HTTP/1.1\r\n{head}Content-Length: 100\r\n\r\n{{".encode())
            # After an answered request on another connection, the server has read this one.
            assert rig.client.health()["status"] == "ok"
    for _ in range(20):
        assert rig.client.server()["store"]["status"] == "ok"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_full_disk_is_reported(rig: Any) -> None:
    rig.controller.error = OSError(28, "No space left on device")
    status, _, answer = rig.raw(
        "POST", "/api/v1/runs", {"Content-Type": "application/json"}, b'{"key": "k", "job": {"name": "x"}}'
    )
    assert status == 507 and str(rig.home.root) in json.loads(answer)["error"]["message"]
