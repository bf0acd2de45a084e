"""A real server over a real store, with a controller that only records. There is no engine, and nothing
happens by itself."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stoker.blobs import BlobStore
from stoker.client import Client
from stoker.control.logs.reader import LogArchive
from stoker.control.notifier import Notifier
from stoker.errors import Conflict, StokerError, StoreDamaged
from stoker.server import startup
from stoker.server.connections import Limits
from stoker.server.http_server import Server
from stoker.server.services import Services
from stoker.settings import Home, Settings
from stoker.store import Store
from stoker.store.codec import RESTORE_HINT
from stoker.store.rows import NewRun, RunRow, UpdateRun
from stoker.task.formats import LogLine

TOKEN = "the-token-of-this-test-server-0123456789"


class QuietController:
    """Records the calls; tests change the state through the store and `publish`."""

    def __init__(self, store: Store, blobs: BlobStore) -> None:
        self.store = store
        self.blobs = blobs
        self.hub = Notifier()
        self.secrets: dict[str, str] = {}
        self.error: Exception | None = None
        self.found: dict[str, Any] = {}

    def submit(
        self,
        *,
        key: str,
        job: Mapping[str, Any],
        code: str | None,
        secrets: Mapping[str, str],
        record: Mapping[str, Any],
        user: str,
    ) -> tuple[RunRow, bool]:
        if self.error is not None:
            raise self.error
        if code is not None and not self.blobs.has_tree(code):
            raise Conflict("the code is not here", details={"missing": "code"})
        self.secrets.update(secrets)
        new = NewRun(
            key=key,
            name=str(job.get("name", "run")),
            job=dict(job),
            command=["true"],
            tags=tuple(job.get("tags", ())),
            code=code,
            record=dict(record),
            user=user,
            fingerprint=json.dumps([dict(job), code]),
        )
        return self.store.submit(new, now=time.time())

    def unknown(self) -> list[dict[str, Any]]:
        return []

    def forget(self, runs: Sequence[str]) -> list[dict[str, Any]]:
        return [{"id": run, "name": None, "t": None, "tasks": []} for run in runs]

    def check(self, **what: Any) -> dict[str, Any]:
        return {"job": dict(what["job"]), "fits": True, "plan": {}, "notes": []}

    def stop_run(self, run_id: str, *, kill: bool, by: str) -> RunRow:
        return self.store.set_desired(run_id, "kill" if kill else "stop", time.time(), by=by)

    def remove(self, run_id: str, *, by: str) -> RunRow:
        return self.store.remove(run_id, now=time.time(), by=by)

    def suspend(self, run_id: str, *, by: str) -> RunRow:
        return self.store.set_desired(run_id, "suspend", time.time(), by=by)

    def resume(
        self, run_id: str, *, key: str, secrets: Mapping[str, str], changes: Sequence[str]
    ) -> tuple[RunRow, bool]:
        return self.store.resume(run_id, key=key, now=time.time())

    def drill(self, run_id: str, how: str, task: str | None = None) -> str:
        return f"hurt {task or run_id} by {how}"

    def why(self, run_id: str) -> dict[str, Any]:
        return {"run": run_id, "state": "queued", "text": "it waits", "hint": None, "facts": {}}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"name": "local"}]

    def places(self, run_ids: Sequence[str]) -> dict[str, int]:
        return dict.fromkeys(run_ids, 1)

    def readiness_of(self, run_ids: Sequence[str]) -> dict[str, Any]:
        return {run_id: self.found[run_id] for run_id in run_ids if run_id in self.found}

    def version(self, run_id: str) -> int:
        return self.hub.version(run_id)

    async def changed(self, run_id: str, seen: int, timeout: float) -> int:
        return await self.hub.changed(run_id, seen, timeout)

    def start(self) -> None: ...

    def shutdown(self) -> None: ...


@dataclass
class Rig:
    """A running server and its parts."""

    home: Home
    services: Services
    store: Store
    blobs: BlobStore
    controller: QuietController
    client: Client
    port: int
    app: Any

    def submit(self, name: str = "digits", **job: Any) -> dict[str, Any]:
        return self.client.submit(key=f"key-{time.time_ns()}", job={"name": name, **job})

    def end(self, run: str, state: str = "succeeded", exit_code: int = 0) -> None:
        values = {"state": state, "exit_code": exit_code, "cause": "completed", "ended_at": time.time()}
        self.store.apply([UpdateRun(run, values)])
        self.controller.hub.publish(run)

    def log(self, run: str, *texts: str, task: str = "worker-0", stream: str = "o") -> None:
        directory = self.home.runs / run / "logs" / "1" / task
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "000001.log").open("ab") as handle:
            for text in texts:
                handle.write(LogLine(stream, int(time.time() * 1000), text.encode()).encode())
        self.controller.hub.publish(run)

    def raw(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One request with exactly these headers (plus Host and the token, unless they are given)."""
        given = {"Host": f"127.0.0.1:{self.port}", "Authorization": f"Bearer {TOKEN}", **(headers or {})}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in given.items():
                if value:
                    connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            response = connection.getresponse()
            return (
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                response.read(),
            )
        finally:
            connection.close()


@contextlib.contextmanager
def running(
    home: Home, settings: Settings | None = None, damage: str = "", limits: Limits | None = None
) -> Iterator[Rig]:
    home.root.mkdir()
    store, blobs = Store.open(home.database), BlobStore(home.blobs)
    controller = QuietController(store, blobs)
    services = Services(
        settings=settings or Settings(home=home),
        token=TOKEN,
        home_id="test",
        blobs=blobs,
        archive=LogArchive(home),
        user="tester",
        started_at=time.time(),
        version="0",
        parts=None if damage else (store, controller),
        trouble=StoreDamaged(damage, hint=RESTORE_HINT) if damage else None,
    )
    with contextlib.closing(startup.bind("127.0.0.1", 0)) as sock:
        services.url = startup.url_of(sock)
        server = Server(services, limits=limits)
        thread = threading.Thread(target=lambda: server.run(sockets=[sock]), daemon=True)
        thread.start()
        with Client(services.url, TOKEN) as client:
            port = sock.getsockname()[1]
            yield Rig(home, services, store, blobs, controller, client, port, server.config.app)
        server.stop()
        thread.join(30)
    store.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Start servers, which end with the test."""
    with contextlib.ExitStack() as stack:
        numbers = itertools.count()

        def start(settings: Settings | None = None, *, damage: str = "", limits: Limits | None = None) -> Rig:
            home = Home(tmp_path / f"home{next(numbers)}")
            return stack.enter_context(running(home, settings, damage, limits))

        yield start


@pytest.fixture
def rig(serve: Callable[..., Rig]) -> Rig:
    return serve()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One server for tests that do not change it."""
    with running(Home(tmp_path_factory.mktemp("shared") / "home")) as rig:
        yield rig


def error_of(body: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(body)["error"]
    assert set(value) == {"code", "message", "hint", "details"}
    return value


@pytest.fixture
def refused() -> Callable[..., StokerError]:
    """The error that a call raises."""

    def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> StokerError:
        with pytest.raises(StokerError) as caught:
            function(*arguments, **named)
        return caught.value

    return call
