"""What a client library does in the situations a long-lived server meets, one situation per process.

`python scenarios.py LIBRARY SCENARIO DIRECTORY` prints what was seen. `probe.py` prepares the directory: identities
(`a.token`, `b.token`, `a.crt`, `b.crt` with keys), the cluster's address and authority, and a socket to ask for
faults. A scenario never asserts: it reports.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

HERE = Path(sys.argv[3] if len(sys.argv) > 3 else ".").resolve()
PLUGIN = """#!{python}
import datetime, json, os, pathlib
here = pathlib.Path({here!r})
run = len(list(here.glob("run-*")))
(here / f"run-{{run}}").write_text(os.environ.get("KUBERNETES_EXEC_INFO", ""))
answers = json.loads((here / "answers").read_text())
status = answers[min(run, len(answers) - 1)]
if "lasts" in status:
    end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=status.pop("lasts"))
    status["expirationTimestamp"] = end.strftime("%Y-%m-%dT%H:%M:%SZ")
print(json.dumps({{"apiVersion": {api!r}, "kind": "ExecCredential", "status": status}}))
"""


def facts() -> dict[str, str]:
    found: dict[str, str] = json.loads((HERE / "facts.json").read_text())
    return found


def encoded(name: str) -> str:
    return base64.b64encode((HERE / name).read_bytes()).decode()


def kubeconfig(user: dict[str, Any], **cluster: Any) -> str:
    where = {"server": facts()["server"], "certificate-authority-data": encoded("ca.crt"), **cluster}
    path = HERE / "kubeconfig.probe"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "p",
                "contexts": [{"name": "p", "context": {"cluster": "p", "user": "p"}}],
                "clusters": [{"name": "p", "cluster": where}],
                "users": [{"name": "p", "user": user}],
            }
        )
    )
    return str(path)


def plugin(*answers: dict[str, Any], api: str = "client.authentication.k8s.io/v1") -> dict[str, Any]:
    (HERE / "answers").write_text(json.dumps(answers))
    for old in HERE.glob("run-*"):
        old.unlink()
    program = HERE / "plugin"
    program.write_text(PLUGIN.format(python=sys.executable, here=str(HERE), api=api))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    mode = {"interactiveMode": "Never", "provideClusterInfo": True}
    return {"exec": {"apiVersion": api, "command": str(program), **mode}}


def runs() -> int:
    return len(list(HERE.glob("run-*")))


def token(name: str) -> str:
    return (HERE / f"{name}.token").read_text()


def pair(name: str) -> dict[str, str]:
    read = {
        key: (HERE / f"{name}.{end}").read_text() for key, end in (("Certificate", "crt"), ("Key", "key"))
    }
    return {f"client{key}Data": value for key, value in read.items()}


def fault(name: str) -> None:
    """Ask whoever owns the cluster to break or mend it."""
    (HERE / "fault").write_text(name)
    while (HERE / "fault").exists():
        time.sleep(0.05)


class Seen:
    def __init__(self, library: str) -> None:
        self.library = importlib.import_module(f"with_{library}")

    async def ask(self, client: Any) -> str:
        try:
            async with asyncio.timeout(30):
                return str(await self.library.whoami(client))
        except Exception as exc:
            return f"{type(exc).__name__}: {' '.join(str(exc).split())[:160]}"

    async def connected(self, user: dict[str, Any] | None, **cluster: Any) -> Any:
        return await self.library.connect(None if user is None else kubeconfig(user, **cluster))

    async def one(self, user: dict[str, Any] | None, **cluster: Any) -> str:
        try:
            client = await self.connected(user, **cluster)
        except Exception as exc:
            return f"{type(exc).__name__}: {' '.join(str(exc).split())[:160]}"
        answer = await self.ask(client)
        await self.library.close(client)
        return answer

    # -- credentials

    async def plugin_expiry(self) -> str:
        """First run: a for 4 s; later: b."""
        try:
            client = await self.connected(
                plugin({"token": token("a"), "lasts": 4}, {"token": token("b"), "lasts": 3600})
            )
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"
        first = [await self.ask(client) for _ in range(3)]
        before = runs()
        await asyncio.sleep(6)
        after = await self.ask(client)
        info = json.loads((HERE / "run-0").read_text() or "{}").get("spec", {}) if runs() else {}
        told = (
            "cluster info given" if "cluster" in info else "told nothing" if not info else "no cluster info"
        )
        return f"{first[0]} ({before} runs for 3 requests), after expiry {after} ({runs()} runs); {told}"

    async def plugin_v1beta1(self) -> str:
        return await self.one(plugin({"token": token("a")}, api="client.authentication.k8s.io/v1beta1"))

    async def plugin_refused(self) -> str:
        """The first token is refused with 401."""
        answer = await self.one(plugin({"token": "nonsense"}, {"token": token("b")}))
        return f"{answer} ({runs()} runs)"

    async def plugin_certificate(self) -> str:
        try:
            client = await self.connected(plugin({**pair("a"), "lasts": 4}, {**pair("b"), "lasts": 3600}))
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"
        first = await self.ask(client)
        await asyncio.sleep(6)
        return f"{first}, after expiry {await self.ask(client)} ({runs()} runs)"

    async def certificate_inline(self) -> str:
        return await self.one(
            {"client-certificate-data": encoded("a.crt"), "client-key-data": encoded("a.key")}
        )

    async def certificate_files_replaced(self) -> str:
        for end in ("crt", "key"):
            (HERE / f"now.{end}").write_bytes((HERE / f"a.{end}").read_bytes())
        client = await self.connected({"client-certificate": "now.crt", "client-key": "now.key"})
        first = await self.ask(client)
        for end in ("crt", "key"):
            (HERE / f"now.{end}").write_bytes((HERE / f"b.{end}").read_bytes())
        await asyncio.sleep(3)
        return f"{first}, then {await self.ask(client)}"

    async def token_file_replaced(self) -> str:
        path = HERE / "now.token"
        path.write_text(token("a"))
        return await self._rotated({"tokenFile": str(path)}, path)

    async def token_file_becomes_valid(self) -> str:
        """A token that is refused is replaced in its file: is the file read again after a 401?"""
        path = HERE / "now.token"
        path.write_text("nonsense")
        client = await self.connected({"tokenFile": str(path)})
        first = await self.ask(client)
        path.write_text(token("a"))
        return f"{first}; then {await self.ask(client)}"

    async def in_cluster(self) -> str:
        return await self._rotated(None, Path("/var/run/secrets/kubernetes.io/serviceaccount/token"))

    async def _rotated(self, user: dict[str, Any] | None, path: Path) -> str:
        try:
            client = await self.connected(user)
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"
        first = await self.ask(client)
        path.write_text(token("b"))
        await asyncio.sleep(3)
        soon = await self.ask(client)
        await asyncio.sleep(62)
        return f"{first}, 3 s after the file changed {soon}, 65 s after {await self.ask(client)}"

    # -- connections

    async def authority(self) -> str:
        right = await self.one({"token": token("a")})
        wrong = await self.one(
            {"token": token("a")}, **{"certificate-authority-data": encoded("other-ca.crt")}
        )
        named = await self.one({"token": token("a")}, **{"tls-server-name": "kubernetes"})
        misnamed = await self.one({"token": token("a")}, **{"tls-server-name": "else.where"})
        return f"right: {right}; wrong: {wrong}; tls-server-name: {named}; wrong name: {misnamed}"

    async def proxies(self) -> str:
        """By proxy-url, by environment, and around it by NO_PROXY with a network."""
        async with proxy() as (url, asked):
            found = [
                f"proxy-url: {await self.one({'token': token('a')}, **{'proxy-url': url})}, {len(asked)} through it"
            ]
            for no_proxy in ("", "10.0.0.0/8"):
                asked.clear()
                os.environ.update(HTTPS_PROXY=url, https_proxy=url, NO_PROXY=no_proxy, no_proxy=no_proxy)
                answer = await self.one({"token": token("a")})
                found.append(
                    f"{f'NO_PROXY={no_proxy}' if no_proxy else 'HTTPS_PROXY'}: {answer}, {len(asked)} through it"
                )
        return "; ".join(found)

    # -- watches

    async def watch_frozen(self) -> str:
        """The API server stops answering, its connections stay open."""
        return await self._watching(lambda: fault("freeze"), 60, lambda: fault("thaw"))

    async def watch_restarted(self) -> str:
        """The API server is killed and started again; then something changes."""

        def change() -> None:
            fault("restart")
            fault("create")

        return await self._watching(change, 45)

    async def watch_gone(self) -> str:
        """Everything before now is compacted; the watch begins at a version from before."""
        version = facts()["old_version"]
        return await self._watching(lambda: fault("create"), 20, version=version)

    async def watch_cancelled(self) -> str:
        client = await self.connected({"token": token("a")})
        await self.ask(client)
        task = asyncio.create_task(self._events(client, "", []))
        await asyncio.sleep(2)
        began = time.monotonic()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        took = time.monotonic() - began
        await self.library.close(client)
        await asyncio.sleep(0.5)
        mine = psutil.Process()
        sockets = [c for c in mine.net_connections() if c.status == "ESTABLISHED"]
        tasks = len(asyncio.all_tasks()) - 1
        return f"took {took * 1000:.0f} ms; left: {len(sockets)} connections, {tasks} tasks, {mine.num_threads() - 1} threads"

    async def _watching(
        self,
        trouble: Callable[[], None],
        limit: float,
        mend: Callable[[], None] = lambda: None,
        version: str = "",
    ) -> str:
        client = await self.connected({"token": token("a")})
        await self.ask(client)
        seen: list[str] = []
        task = asyncio.create_task(self._events(client, version, seen))
        await asyncio.sleep(2)
        before = len(seen)
        began = time.monotonic()
        await asyncio.to_thread(trouble)
        done, _ = await asyncio.wait([task], timeout=limit)
        took = time.monotonic() - began
        if done:
            exc = task.exception()
            end = (
                f"{type(exc).__name__}: {' '.join(str(exc).split())[:160]}" if exc else "ended without a word"
            )
            found = f"after {took:.1f} s: {end}"
        else:
            found = f"nothing raised in {took:.0f} s"
        await asyncio.to_thread(mend)
        task.cancel()
        return f"{found}; {before} events before, {len(seen) - before} after"

    async def _events(self, client: Any, version: str, seen: list[str]) -> None:
        async with contextlib.aclosing(self.library.watch(client, version or facts()["version"])) as events:
            async for name in events:
                seen.append(name)

    # -- weight

    async def weight(self) -> str:
        """Of importing it and making a client, in a fresh process."""
        code = (
            "import asyncio, sys, time, psutil; sys.path.insert(0, {here!r}); p = psutil.Process(); r = p.memory_info().rss;"
            "t = time.process_time(); import with_{name} as l; i = time.process_time() - t;"
            "c = asyncio.run(l.connect({config!r})); print(round(i * 1000), (p.memory_info().rss - r) >> 20)"
        )
        config = kubeconfig({"token": token("a")})
        name = self.library.__name__.removeprefix("with_")
        figures = []
        for _ in range(5):
            done = subprocess.run(
                [
                    sys.executable,
                    "-W",
                    "ignore",
                    "-c",
                    code.format(here=str(Path(__file__).parent), name=name, config=config),
                ],
                capture_output=True,
                text=True,
            )
            figures.append(tuple(int(part) for part in done.stdout.split()))
        return f"import {min(f[0] for f in figures)} ms of CPU, {min(f[1] for f in figures)} MiB"


@contextlib.asynccontextmanager
async def proxy() -> Any:
    """CONNECT, and a list of what was asked for."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        asked.append(head.split()[1])
        host, _, port = head.split()[1].rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 ok\r\n\r\n")
        await asyncio.gather(pump(reader, back), pump(there, writer))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()


async def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    scenario: Callable[[], Awaitable[str]] = getattr(Seen(sys.argv[1]), sys.argv[2])
    print(await scenario(), flush=True)
    os._exit(0)  # a library's thread may be stuck


SCENARIOS = [
    name for name in vars(Seen) if not name.startswith("_") and name not in ("ask", "connected", "one")
]

if __name__ == "__main__":
    asyncio.run(main())
