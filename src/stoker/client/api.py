"""The client: one method per route of docs/api.md. Each returns the body of the route's answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from stoker.client.frames import frames
from stoker.client.http import Address, Connection, Response
from stoker.errors import ServerUnreachable, StokerError, from_json

Json = dict[str, Any]

FOLLOW_TIMEOUT = 60.0
"""Seconds without a byte before a followed log counts as broken. The server sends something every 15."""


class Client:
    """Talks to one server. May be used from several threads: each request has its own connection while it lasts, and
    idle connections are kept for the next request.

    Errors that the server reports are raised as the same class (stoker.errors). A server that does not answer raises
    ServerUnreachable. The client never repeats a request that changes something.
    """

    def __init__(self, url: str, token: str, timeout: float = 30.0) -> None:
        self._address = Address(url)
        self._token = token
        self.timeout = timeout
        self._idle: list[Connection] = []

    @property
    def url(self) -> str:
        return self._address.url

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    # -- the server ------------------------------------------------------------------------------------------

    def health(self) -> Json:
        return self._get("/healthz")

    def server(self) -> Json:
        return self._get("/api/v1/server")

    def nodes(self) -> Json:
        return self._get("/api/v1/nodes")

    def clusters(self) -> Json:
        return self._get("/api/v1/clusters")

    def add_cluster(self, name: str, config: Mapping[str, Any], changes: Sequence[str] = ()) -> Json:
        return self._post(
            "/api/v1/clusters", {"name": name, "config": dict(config), "set": list(changes)}, timeout=60.0
        )

    def change_cluster(self, name: str, changes: Sequence[str]) -> Json:
        return self._send("PUT", f"/api/v1/clusters/{quote(name, safe='')}", {"set": list(changes)})

    def remove_cluster(self, name: str) -> Json:
        return self._call("DELETE", f"/api/v1/clusters/{quote(name, safe='')}", None)

    def check_cluster(self, name: str) -> Json:
        return self._post(f"/api/v1/clusters/{quote(name, safe='')}/check", {}, timeout=130.0)

    def backup(self, path: str | None = None) -> Json:
        return self._post("/api/v1/backups", {"path": path}, timeout=3600.0)

    def forget(self, runs: Sequence[str] = ()) -> Json:
        """Ends and forgets runs that the database does not know; all of them where none is named."""
        return self._post("/api/v1/forget", {"runs": list(runs)})

    def shutdown(self) -> Json:
        return self._post("/api/v1/shutdown", {})

    # -- runs ------------------------------------------------------------------------------------------------

    def submit(
        self,
        *,
        key: str,
        job: Mapping[str, Any],
        code: str | None = None,
        secrets: Mapping[str, str] | None = None,
        record: Mapping[str, Any] | None = None,
        links: Mapping[str, str] | None = None,
    ) -> Json:
        """Submits and returns the run. Safe to send again with the same key after ServerUnreachable."""
        body = _submission(key, job, code, secrets, record)
        return self._post("/api/v1/runs", {**body, "links": dict(links)} if links else body)

    def check(
        self,
        *,
        job: Mapping[str, Any],
        key: str = "dry-run",
        code: str | None = None,
        secrets: Mapping[str, str] | None = None,
        record: Mapping[str, Any] | None = None,
    ) -> Json:
        return self._post("/api/v1/runs/check", _submission(key, job, code, secrets, record))

    def runs(
        self,
        *,
        state: str | Sequence[str] = (),
        tag: str | Sequence[str] = (),
        name: str | None = None,
        name_like: str | None = None,
        project: str | None = None,
        limit: int | None = None,
        before: int | None = None,
        trash: bool = False,
    ) -> Json:
        query = {
            "state": _listed(state),
            "tag": _listed(tag),
            "name": name,
            "name_like": name_like,
            "project": project,
            "limit": limit,
            "before": before,
            "trash": int(trash) or None,
        }
        return self._get("/api/v1/runs", query)

    def run(self, run: str) -> Json:
        return self._get(_path(run))

    def stop(self, run: str, *, kill: bool = False) -> Json:
        return self._post(_path(run, "stop"), {"kill": kill})

    def resume(
        self, run: str, *, key: str, secrets: Mapping[str, str] | None = None, set: Sequence[str] = ()
    ) -> Json:
        return self._post(
            _path(run, "resume"), {"key": key, "secrets": dict(secrets or {}), "set": list(set)}
        )

    def suspend(self, run: str) -> Json:
        return self._post(_path(run, "suspend"), {})

    def remove(self, run: str) -> Json:
        """Puts an ended run into the trash."""
        return self._call("DELETE", _path(run), None)

    def restore(self, run: str) -> Json:
        """Takes a run out of the trash."""
        return self._post(_path(run, "restore"), {})

    def sizes(self, runs: Sequence[str], *, metric: str | None = None) -> Json:
        """What is stored of each run; with a metric its last value too."""
        return self._post("/api/v1/runs/sizes", {"runs": list(runs), "metric": metric}, timeout=600.0)

    def empty_trash(self) -> Json:
        return self._post("/api/v1/trash/empty", {}, timeout=3600.0)

    def disk(self) -> Json:
        return self._call("GET", "/api/v1/disk", None, timeout=600.0)

    def resize(self, run: str, *, cpu: str | None = None, memory: str | None = None) -> Json:
        return self._post(_path(run, "resize"), {"cpu": cpu, "memory": memory}, timeout=90.0)

    def shell(self, run: str, task: str | None = None) -> Json:
        return self._post(_path(run, "shell"), {"task": task} if task else {}, timeout=90.0)

    def scale(self, run: str, workers: int) -> Json:
        return self._post(_path(run, "scale"), {"workers": workers}, timeout=90.0)

    def drill(self, run: str, how: str = "process", task: str | None = None) -> Json:
        return self._post(_path(run, "drill"), {"how": how, **({"task": task} if task else {})})

    def events(self, run: str) -> Json:
        return self._get(_path(run, "events"))

    def wait(self, run: str, *, timeout: float = 30.0) -> Json:
        """The run once it is terminal or suspended, or its state after the timeout (server: at most 60)."""
        return self._get(_path(run, "wait"), {"timeout": timeout}, timeout=timeout + self.timeout)

    def why(self, run: str) -> Json:
        return self._get(_path(run, "why"))

    # -- what a run wrote ------------------------------------------------------------------------------------

    def logs(
        self,
        run: str,
        *,
        task: str | None = None,
        attempt: int | None = None,
        stream: str | None = None,
        since: float | None = None,
        tail: int | None = None,
        follow: bool = False,
    ) -> Iterator[Json]:
        """Records as docs/api.md describes them, as they arrive. Close the generator to stop following."""
        query = {"task": task, "attempt": attempt, "stream": stream, "since": since, "tail": tail}
        timeout = FOLLOW_TIMEOUT if follow else self.timeout
        connection, response = self._open(
            "GET", _path(run, "logs") + _query({**query, "follow": int(follow)}), None, timeout
        )
        with contextlib.closing(response):
            for line in response.lines():
                # An empty line only shows that the server is alive.
                if line:
                    yield json.loads(line)
        self._give_back(connection, response)

    def metrics(self, run: str) -> Json:
        return self._get(_path(run, "metrics"))

    def metric(self, run: str, key: str, *, max_points: int | None = None) -> Json:
        return self._get(_path(run, "metrics", quote(key, safe="")), {"max_points": max_points})

    def files(self, run: str, *, what: str = "outputs", checkpoint: str | None = None) -> Json:
        return self._get(_path(run, "files"), {"what": what, "checkpoint": checkpoint})

    def content(
        self, run: str, path: str, *, what: str = "outputs", checkpoint: str | None = None, offset: int = 0
    ) -> Iterator[bytes]:
        """The bytes of one file from `offset` on, in pieces."""
        query = _query({"what": what, "checkpoint": checkpoint, "path": path})
        extra = {"Range": f"bytes={offset}-"} if offset else {}
        connection, response = self._open(
            "GET", _path(run, "files", "content") + query, None, self.timeout, extra
        )
        with contextlib.closing(response):
            if offset and response.status != 206:
                raise StokerError(f"the server at {self.url} did not honour the range of {path!r}")
            yield from response.chunks()
        self._give_back(connection, response)

    def contents(
        self,
        run: str,
        digests: Sequence[str],
        *,
        what: str = "outputs",
        checkpoint: str | None = None,
        limit: int = 1 << 20,
    ) -> Generator[tuple[str, bytes | str]]:
        """Many small files in one answer: (digest, bytes), or (digest, `missing` or `damaged`). `limit`: bytes of the
        largest. Raises NotFound also for a server that is too old for this route."""
        query = _query({"what": what, "checkpoint": checkpoint})
        body = json.dumps({"digests": list(digests)}, separators=(",", ":")).encode()
        connection, response = self._open(
            "POST",
            _path(run, "files", "contents") + query,
            body,
            self.timeout,
            {"Content-Type": "application/json"},
        )
        with contextlib.closing(response):
            yield from frames(response.chunks(), limit)
        self._give_back(connection, response)

    # -- code ------------------------------------------------------------------------------------------------

    def code_missing(self, digests: Sequence[str]) -> Json:
        return self._post("/api/v1/code/missing", {"digests": list(digests)})

    def code_blobs(self, body: Iterable[bytes]) -> Json:
        """`body`: repeated `SHA256 SIZE\\n` + bytes, split anywhere."""
        return self._call("POST", "/api/v1/code/blobs", body, content="application/octet-stream")

    def code_tree(self, manifest: bytes) -> Json:
        return self._call("POST", "/api/v1/code/trees", manifest)

    # -- how -------------------------------------------------------------------------------------------------

    def _get(
        self, path: str, query: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> Json:
        return self._call("GET", path + _query(query or {}), None, timeout=timeout)

    def _post(self, path: str, body: Mapping[str, Any], *, timeout: float | None = None) -> Json:
        return self._send("POST", path, body, timeout=timeout)

    def _send(self, method: str, path: str, body: Mapping[str, Any], *, timeout: float | None = None) -> Json:
        return self._call(method, path, json.dumps(body, separators=(",", ":")).encode(), timeout=timeout)

    def _call(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None,
        *,
        timeout: float | None = None,
        content: str = "application/json",
    ) -> Json:
        extra = {"Content-Type": content} if body is not None else {}
        connection, response = self._open(method, path, body, timeout or self.timeout, extra)
        data = response.read()
        self._give_back(connection, response)
        try:
            value = json.loads(data)
        except ValueError as exc:
            raise _not_stoker(self.url, response.status) from exc
        if not isinstance(value, dict):
            raise _not_stoker(self.url, response.status)
        return value

    def _open(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None,
        timeout: float,
        extra: Mapping[str, str] | None = None,
    ) -> tuple[Connection, Response]:
        """An answer with a status below 400 whose body is not read yet."""
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json", **(extra or {})}
        connection = self._connection()
        try:
            response = connection.request(method, path, headers, body, timeout)
        except ServerUnreachable:
            if method != "GET" or connection.fresh:
                raise
            # The server closed an idle connection at this moment. Reading twice is harmless.
            connection = Connection(self._address)
            response = connection.request(method, path, headers, body, timeout)
        if response.status >= 400:
            raise self._error(connection, response)
        return connection, response

    def _error(self, connection: Connection, response: Response) -> StokerError:
        data = response.read()
        self._give_back(connection, response)
        try:
            return from_json(json.loads(data)["error"])
        except (ValueError, TypeError, KeyError, AttributeError):
            return _not_stoker(self.url, response.status)

    def _connection(self) -> Connection:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                # Another thread took the last connection.
                break
            if not connection.stale():
                return connection
            connection.close()
        return Connection(self._address)

    def _give_back(self, connection: Connection, response: Response) -> None:
        if response.reusable:
            self._idle.append(connection)
        else:
            connection.close()


def _submission(
    key: str,
    job: Mapping[str, Any],
    code: str | None,
    secrets: Mapping[str, str] | None,
    record: Mapping[str, Any] | None,
) -> Json:
    return {
        "key": key,
        "job": dict(job),
        "code": code,
        "secrets": dict(secrets or {}),
        "record": dict(record or {}),
    }


def _path(run: str, *rest: str) -> str:
    return "/".join(("/api/v1/runs", quote(run, safe=""), *rest))


def _query(values: Mapping[str, Any]) -> str:
    given = [(name, value) for name, value in values.items() if value is not None and value != ""]
    return "?" + urlencode(given) if given else ""


def _listed(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else ",".join(value)


def _not_stoker(url: str, status: int) -> StokerError:
    return StokerError(
        f"{url} answered with status {status} and a body that is not Stoker's",
        hint="Check that STOKER_URL names a Stoker server and that no proxy stands in between.",
    )
