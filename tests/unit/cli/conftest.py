"""A small server that speaks docs/api.md over real HTTP, and a way to run commands against it."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

NOW = 1_700_000_000.0
"""2023-11-14 22:13:20 UTC: what the clock says in these tests."""
TERMINAL = ("succeeded", "failed", "stopped")
Json = dict[str, Any]


def make_run(run_id: str, state: str = "running", **over: Any) -> Json:
    base: Json = {
        "id": run_id,
        "name": run_id.rsplit("-", 1)[0],
        "project": "default",
        "state": state,
        "priority": 0,
        "tags": [],
        "seq": 1,
        "created_at": NOW - 200,
        "started_at": None if state == "queued" else NOW - 192,
        "ended_at": NOW - 60 if state in TERMINAL else None,
        "user": "ada",
        "exit_code": {"succeeded": 0, "failed": 1}.get(state),
        "cause": {"succeeded": "completed", "failed": "user-error", "stopped": "stopped"}.get(state),
        "reason": "",
        "job": {"run": ["python", "train.py"], "resources": {"gpu": 0}, "workers": 1, "secrets": []},
        "command": ["python", "train.py"],
        "code": "1f3a" * 16,
        "record": {"git": {"commit": "12ab34cd56ef7890", "dirty": True, "diff": ""}},
        "attempts": [],
        "checkpoints": [],
        "outputs": None,
        "warnings": [],
        "place": None,
    }
    return {**base, **over}


class Fake:
    """The state of the server. `requests` lists (method, path, query, body) in order of arrival."""

    def __init__(self) -> None:
        self.runs: list[Json] = []
        self.events: dict[str, list[Json]] = {}
        self.logs: list[list[Json]] = []
        """One list of records per request for logs; the last one is served again and again."""
        self.metrics: dict[str, Json] = {}
        self.points: dict[str, list[Any]] = {}
        self.files: dict[str, bytes] = {}
        self.file_list: list[Json] | None = None
        self.nodes: list[Json] = []
        self.why: Json = {}
        self.counts: Json = {}
        self.unknown: list[Json] = []
        self.lost: Json = {}
        """What the server says of its database where that is lost."""
        self.submitted: list[Json] = []
        self.errors: dict[tuple[str, str], tuple[int, Json]] = {}
        self.on_drill: Callable[[Json], None] = lambda run: None
        self.on_stop: Callable[[Json], None] = lambda run: None
        self.cut_content_after: int | None = None
        self.hold = threading.Event()
        """A record `{"hold": true}` in a log waits until this is set."""
        self.requests: list[tuple[str, str, Json, Any]] = []
        self.known_code = True
        self.plan: Json = {"tasks": [{"name": "worker-0"}]}
        self.images = True
        """Whether something on its machine runs them."""
        self.scaled: Json = {}
        self.trash: list[Json] = []
        self.sizes: dict[str, int] = {}
        """Bytes of checkpoints by run."""
        self.logs_size = 0
        self.disk: Json = {}
        self.url = ""

    def find(self, ref: str) -> Json | None:
        """By id, else the newest run of that name, else the only run whose id begins so."""
        begins = [run for run in self.runs if run["id"].startswith(ref)]
        exact = [run for run in self.runs if ref == run["id"]] or [
            run for run in self.runs if ref == run["name"]
        ]
        return exact[0] if exact else begins[0] if len(begins) == 1 else None

    def listing(self, query: Json) -> Json:
        found = self.trash if "trash" in query else self.runs
        if "state" in query:
            found = [r for r in found if r["state"] in query["state"].split(",")]
        if "tag" in query:
            found = [r for r in found if set(query["tag"].split(",")) <= set(r["tags"])]
        if "name" in query:
            found = [r for r in found if r["name"] == query["name"]]
        if "name_like" in query:
            found = [r for r in found if query["name_like"] in r["name"]]
        limit = int(query.get("limit", 50))
        return {"runs": found[:limit], "next": found[limit - 1]["seq"] if len(found) > limit else None}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: Fake

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer("GET", None)

    def do_POST(self) -> None:
        data = self.body()
        self.answer(
            "POST", json.loads(data) if self.headers.get("Content-Type") == "application/json" else data
        )

    def do_DELETE(self) -> None:
        self.answer("DELETE", None)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, method: str, body: Any) -> None:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        path = unquote(parts.path).removeprefix("/api/v1")
        self.fake.requests.append((method, path, query, body))
        if self.headers.get("Authorization") != "Bearer secret":
            return self.fail(401, "unauthorized", "wrong token")
        if (method, path) in self.fake.errors:
            status, error = self.fake.errors[method, path]
            return self.send(status, {"error": error})
        words = path.strip("/").split("/")
        if words[0] == "runs" and len(words) > 1 and words[1] not in ("check", "sizes"):
            run = self.fake.find(words[1])
            if method == "DELETE" and run is not None:
                return self.remove(run)
            if run is None:
                return self.fail(404, "not-found", f"no run {words[1]!r}")
            return self.of_run(run, words[2:], query, body)
        return self.of_server(method, words, query, body)

    def size(self, run: str) -> Json:
        size = self.fake.sizes.get(run, 0)
        logs = self.fake.logs_size
        return {"checkpoints": size, "outputs": 0, "folder": 0, "logs": logs, "total": size + logs}

    def remove(self, run: Json) -> None:
        self.fake.runs.remove(run)
        run |= {"removed_at": NOW, "until": NOW + 7 * 86400}
        self.fake.trash.append(run)
        return self.send(200, {**run, "bytes": self.size(run["id"])})

    def of_server(self, method: str, words: list[str], query: Json, body: Any) -> None:
        fake = self.fake
        if words == ["runs"] and method == "GET":
            return self.send(200, fake.listing(query))
        if words == ["runs"]:
            if body["code"] is not None and not fake.known_code:
                error = {
                    "code": "conflict",
                    "message": "the code is not here",
                    "details": {"missing": "code"},
                }
                return self.send(409, {"error": error})
            fake.submitted.append(body)
            run = make_run("digits-7f3k", "queued", job=body["job"])
            fake.runs.insert(0, run)
            return self.send(201, run)
        if words == ["runs", "check"]:
            if body["job"].get("image") and not fake.images and body["job"].get("cluster") in (None, "local"):
                error = {"code": "refused", "message": "image: needs podman", "details": {"key": "image"}}
                return self.send(422, {"error": error})
            plan = {"engine": "local", **fake.plan}
            return self.send(200, {"job": body["job"], "fits": True, "plan": plan, "notes": ["a note"]})
        if words == ["code", "missing"]:
            return self.send(200, {"missing": body["digests"]})
        if words == ["code", "blobs"]:
            return self.send(200, {"stored": 1})
        if words == ["code", "trees"]:
            fake.known_code = True
            canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
            return self.send(200, {"digest": hashlib.sha256(canonical).hexdigest()})
        if words == ["runs", "sizes"]:
            metrics = {run: values.get(body["metric"]) for run, values in fake.metrics.items()}
            found = {run: {"bytes": self.size(run), "metric": metrics.get(run)} for run in body["runs"]}
            return self.send(200, {"runs": found})
        if words == ["trash", "empty"]:
            ids = [run["id"] for run in fake.trash]
            fake.trash = []
            return self.send(200, {"runs": ids, "held": ["far-0000"], "bytes": 3 << 20, "later": True})
        if words == ["disk"]:
            return self.send(200, fake.disk)
        if words == ["nodes"]:
            return self.send(200, {"nodes": fake.nodes})
        if words == ["backups"]:
            return self.send(200, {"path": body["path"] or "/home/ada/backups/one"})
        if words == ["server"]:
            store = {"kind": "sqlite", "schema": 1, "status": "ok", **fake.lost}
            about = {"version": "0.1.0", "pid": 4711, "url": fake.url, "home": "/h", "started_at": NOW - 3700}
            counted = {"counts": fake.counts, "unknown": fake.unknown}
            return self.send(200, {**about, "leading": True, "store": store, **counted})
        if words == ["forget"]:
            named = [one for one in fake.unknown if one["id"] in body["runs"] or not body["runs"]]
            return self.send(200, {"forgotten": named})
        return self.fail(404, "not-found", f"no route {words}")

    def of_run(self, run: Json, words: list[str], query: Json, body: Any) -> None:
        fake = self.fake
        if not words or words == ["wait"]:
            return self.send(200, run)
        if words == ["stop"]:
            run["state"] = "stopping"
            fake.on_stop(run)
            return self.send(200, run)
        if words in (["suspend"], ["resume"]):
            run["state"] = {"suspend": "stopping", "resume": "queued"}[words[0]]
            return self.send(200, run)
        if words == ["shell"]:
            return self.send(200, {"argv": ["enter"], "env": {}, "cwd": None})
        if words == ["scale"]:
            return self.send(200, fake.scaled)
        if words == ["drill"]:
            fake.on_drill(run)
            return self.send(200, {"did": f"killed the {body['how']} of {run['id']}"})
        if words == ["events"]:
            return self.send(200, {"events": fake.events.get(run["id"], [])})
        if words == ["why"]:
            return self.send(200, fake.why)
        if words == ["logs"]:
            return self.stream_logs()
        if words == ["metrics"]:
            return self.send(200, {"keys": list(fake.metrics.values())})
        if words[0] == "metrics":
            key = "/".join(words[1:])
            return self.send(200, {"key": key, "points": fake.points[key]})
        if words == ["files"]:
            listed = [
                {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                for path, data in fake.files.items()
            ]
            return self.send(200, {"files": listed if fake.file_list is None else fake.file_list})
        if words == ["files", "content"]:
            return self.content(fake.files[query["path"]])
        return self.fail(404, "not-found", f"no route {words}")

    def stream_logs(self) -> None:
        """A list without an `end` record breaks off, as when the server dies."""
        records = self.fake.logs.pop(0) if len(self.fake.logs) > 1 else self.fake.logs[0]
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Connection", "close")
        self.end_headers()
        for record in records:
            if "hold" in record:
                self.fake.hold.wait(60)
                continue
            self.wfile.write(json.dumps(record).encode() + b"\n")
        self.close_connection = True

    def content(self, data: bytes) -> None:
        start = 0
        if "Range" in self.headers:
            start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        cut = self.fake.cut_content_after
        if cut is not None:
            self.fake.cut_content_after = None
            self.wfile.write(data[start : start + cut])
            self.close_connection = True
            return
        self.wfile.write(data[start:])

    def fail(self, status: int, code: str, message: str) -> None:
        self.send(status, {"error": {"code": code, "message": message, "hint": None, "details": {}}})

    def send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    def __repr__(self) -> str:
        return f"exit {self.code}\n--- stdout\n{self.out}--- stderr\n{self.err}"


Invoke = Callable[..., Result]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Fake]:
    found = Fake()
    handler = type("BoundHandler", (Handler,), {"fake": found})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("STOKER_URL", found.url)
    monkeypatch.setenv("STOKER_TOKEN", "secret")
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """The wall clock stands still, in UTC."""
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield NOW
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Invoke:
    """Run a command in this process. `tty=80`: on a terminal of that width. `typed`: the answers of the
    user."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.chdir(tmp_path)

    def call(*argv: str, tty: int | None = None, typed: str | None = None) -> Result:
        from stoker.cli.context import Context
        from stoker.cli.main import dispatch, guarded

        out, err = (Terminal(), Terminal()) if tty else (io.StringIO(), io.StringIO())
        if tty:
            monkeypatch.setenv("COLUMNS", str(tty))
        stdin = Terminal(typed) if typed is not None else None
        ctx = Context(out, err, stdin)
        code = guarded(ctx, lambda: dispatch(ctx, list(argv)))
        return Result(code, out.getvalue(), err.getvalue())

    return call


@pytest.fixture(name="make_run")
def make_run_fixture() -> Callable[..., Json]:
    return make_run
