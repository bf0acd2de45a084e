"""The Kubernetes client on a real cluster: objects, caches through faults, connections into pods."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from harness.pods import pod

from stoker.engine.kubernetes.api import kinds
from stoker.engine.kubernetes.api.client import Kube
from stoker.engine.kubernetes.api.errors import Disconnected, KubeError, KubeUnavailable
from stoker.engine.kubernetes.api.informer import Informer, Select
from stoker.engine.kubernetes.api.kinds import Kind
from stoker.engine.kubernetes.api.kubeconfig import KubeConfig
from stoker.engine.kubernetes.api.session import Answer
from stoker.errors import EngineUnavailable
from support.waiting import wait_async

REVIEWS = Kind("authentication.k8s.io/v1", "SelfSubjectReview", "selfsubjectreviews", namespaced=False)
SERVER = Path(__file__).with_name("pod_server.py")


@contextlib.asynccontextmanager
async def client(path: Path) -> AsyncIterator[Kube]:
    kube = Kube.from_config(KubeConfig.load(path))
    try:
        yield kube
    finally:
        await kube.close()


@contextlib.asynccontextmanager
async def mirror(kube: Kube, *selects: Select | Kind, **options: Any) -> AsyncIterator[Informer]:
    cache = Informer(kube, selects, **options)
    cache.start()
    try:
        await cache.ready()
        yield cache
    finally:
        await cache.close()


def configmap(name: str, **data: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "data": data}


def test_objects(cluster: Any, namespace: str) -> None:
    async def story() -> None:
        async with client(cluster.kubeconfig) as kube:
            assert (await kube.version()).startswith("v1.")
            made = await kube.create(kinds.CONFIGMAPS, configmap("a", x="1"), namespace)
            with pytest.raises(KubeError) as taken:
                await kube.create(kinds.CONFIGMAPS, configmap("a"), namespace)
            assert taken.value.exists
            for how, patch in (
                ("merge", {"data": {"x": "2"}}),
                ("json", [{"op": "replace", "path": "/data/x", "value": "3"}]),
                ("strategic", {"data": {"y": "4"}}),
                ("apply", {"apiVersion": "v1", "kind": "ConfigMap", "data": {"z": "5"}}),
            ):
                changed = await kube.patch(kinds.CONFIGMAPS, "a", patch, namespace, how=how)  # type: ignore[arg-type]
            assert changed["data"] == {"x": "3", "y": "4", "z": "5"}
            with pytest.raises(KubeError, match="nvalid") as invalid:
                await kube.create(kinds.CONFIGMAPS, configmap("Not_A_Name"), namespace)
            assert invalid.value.status == 422
            await kube.create(kinds.CONFIGMAPS, configmap("b"), namespace, dry_run=True)
            assert "b" not in [
                obj["metadata"]["name"] for obj in (await kube.snapshot(kinds.CONFIGMAPS, namespace))[0]
            ]
            assert not await kube.delete(kinds.CONFIGMAPS, "a", namespace, uid="another")
            assert await kube.delete(kinds.CONFIGMAPS, "a", namespace, uid=made["metadata"]["uid"])
            assert not await kube.delete(kinds.CONFIGMAPS, "a", namespace)
            with pytest.raises(KubeError) as absent:
                await kube.get(kinds.CONFIGMAPS, "a", namespace)
            assert absent.value.absent
            assert kube.calls["patch", "configmaps"] == 4

    asyncio.run(story())


def test_a_cache_of_every_kind_the_engine_needs(cluster: Any, namespace: str) -> None:
    async def story() -> None:
        selects = [Select(kind, namespace) for kind in (kinds.PODS, kinds.SECRETS, kinds.EVENTS)]
        async with client(cluster.kubeconfig) as kube, mirror(kube, *selects, kinds.NODES) as cache:
            assert sorted(node["metadata"]["name"] for node in cache.list(kinds.NODES)) == sorted(
                cluster.nodes
            )
            await kube.create(kinds.SECRETS, {"metadata": {"name": "s"}, "stringData": {"x": "y"}}, namespace)
            made = await kube.create(kinds.PODS, pod("p", cluster.images["busybox"], "sleep 3600"), namespace)
            cache.note(kinds.PODS, made)
            assert cache.get(kinds.PODS, "p", namespace) is not None, "our own write is there at once"
            await wait_async(
                lambda: (cache.get(kinds.PODS, "p", namespace) or made)["status"].get("phase") == "Running"
            )
            await wait_async(lambda: cache.get(kinds.SECRETS, "s", namespace))
            await wait_async(lambda: "Scheduled" in {event["reason"] for event in cache.list(kinds.EVENTS)})
            found = cache.get(kinds.PODS, "p", namespace)
            assert found is not None and "managedFields" not in found["metadata"]
            await kube.delete(kinds.PODS, "p", namespace, grace=0)
            await wait_async(lambda: cache.list(kinds.PODS) == [])

    asyncio.run(story())


def test_pages_are_one_moment(cluster: Any, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.engine.kubernetes.api.client.PAGE", 3)

    async def story() -> None:
        async with client(cluster.kubeconfig) as kube:
            names = [f"n{number:02}" for number in range(10)]
            await asyncio.gather(
                *(kube.create(kinds.CONFIGMAPS, configmap(name), namespace) for name in names)
            )
            found, version = await kube.snapshot(kinds.CONFIGMAPS, namespace, labels="")
            assert [obj["metadata"]["name"] for obj in found if obj["metadata"]["name"] in names] == names
            assert version.isdigit() and kube.calls["list", "configmaps"] >= 4

    asyncio.run(story())


# -- faults


def test_a_cache_lives_through_a_killed_api_server(cluster: Any, namespace: str) -> None:
    async def story() -> None:
        async with (
            client(cluster.kubeconfig) as kube,
            mirror(kube, Select(kinds.CONFIGMAPS, namespace)) as cache,
        ):
            await kube.create(kinds.CONFIGMAPS, configmap("before"), namespace)
            await wait_async(lambda: cache.get(kinds.CONFIGMAPS, "before", namespace))
            await asyncio.to_thread(cluster.stop_api)
            await wait_async(lambda: cache.problem())
            assert cache.get(kinds.CONFIGMAPS, "before", namespace), "silence does not remove objects"
            await asyncio.to_thread(cluster.start_api)
            await kube.create(kinds.CONFIGMAPS, configmap("after"), namespace)
            await wait_async(lambda: cache.fresh() and cache.get(kinds.CONFIGMAPS, "after", namespace))
            assert cache.get(kinds.CONFIGMAPS, "before", namespace)

    asyncio.run(story())


class Relay:
    """A connection to the API server that can be broken and restored."""

    def __init__(self, server: str) -> None:
        self._host, self._port = server.removeprefix("https://").rsplit(":", 1)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self.port = 0

    async def give(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def take(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        self._open.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, int(self._port))
        for one, other in ((reader, back), (there, writer)):
            self._open.add(asyncio.create_task(self._carry(one, other)))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)


def test_a_cache_reports_objects_deleted_while_it_was_cut_off(
    cluster: Any, namespace: str, tmp_path: Path
) -> None:
    content = yaml.safe_load(cluster.kubeconfig.read_text())
    target = content["clusters"][0]["cluster"]

    async def story() -> None:
        relay = Relay(target["server"])
        await relay.give()
        target.update({"server": f"https://127.0.0.1:{relay.port}", "tls-server-name": "kubernetes"})
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(content))
        select = Select(kinds.CONFIGMAPS, namespace)
        async with client(cluster.kubeconfig) as free, client(path) as kube, mirror(kube, select) as cache:
            for name in ("stays", "vanishes"):
                await free.create(kinds.CONFIGMAPS, configmap(name), namespace)
            await wait_async(lambda: cache.get(kinds.CONFIGMAPS, "vanishes", namespace))
            await wait_async(lambda: cache.get(kinds.CONFIGMAPS, "kube-root-ca.crt", namespace))
            reader, lists = cache.changes(), kube.calls["list", "configmaps"]
            await relay.take()
            await free.delete(kinds.CONFIGMAPS, "vanishes", namespace)
            await free.create(kinds.CONFIGMAPS, configmap("appears"), namespace)
            await asyncio.to_thread(cluster.compact)
            await relay.give()
            await wait_async(lambda: cache.fresh() and cache.get(kinds.CONFIGMAPS, "appears", namespace))
            assert cache.get(kinds.CONFIGMAPS, "vanishes", namespace) is None
            assert cache.get(kinds.CONFIGMAPS, "stays", namespace)
            assert kube.calls["list", "configmaps"] > lists, (
                "the history was compacted: the cache lists again"
            )
            told = [await asyncio.wait_for(anext(reader), 60) for _ in range(2)]
            assert {(change.name, change.deleted) for change in told} == {
                ("appears", False),
                ("vanishes", True),
            }
        await relay.take()

    asyncio.run(story())


def test_a_version_that_was_compacted_is_expired(cluster: Any, namespace: str) -> None:
    async def story() -> None:
        async with client(cluster.kubeconfig) as kube:
            _, version = await kube.snapshot(kinds.CONFIGMAPS, namespace)
            for number in range(5):
                await kube.create(kinds.CONFIGMAPS, configmap(f"n{number}"), namespace)
            await asyncio.to_thread(cluster.compact)
            with pytest.raises(KubeError) as gone:
                async with asyncio.timeout(60):
                    await anext(kube.watch(kinds.CONFIGMAPS, namespace, resource_version=version))
            assert gone.value.expired

    asyncio.run(story())


def test_an_api_server_that_stops_answering_is_silence_and_not_an_empty_cluster(
    cluster: Any, namespace: str
) -> None:
    async def story() -> None:
        select = Select(kinds.CONFIGMAPS, namespace)
        async with client(cluster.kubeconfig) as kube, mirror(kube, select, max_silence=6) as cache:
            await kube.create(kinds.CONFIGMAPS, configmap("a"), namespace)
            await wait_async(lambda: cache.get(kinds.CONFIGMAPS, "a", namespace))
            await asyncio.to_thread(cluster.stop_api, freeze=True)
            try:
                await wait_async(lambda: not cache.fresh())
                with pytest.raises(EngineUnavailable, match="nothing was heard of its configmaps for 6 s"):
                    cache.list(kinds.CONFIGMAPS)
                with pytest.raises(KubeUnavailable, match="no answer from"):
                    await kube.get(kinds.CONFIGMAPS, "a", namespace, timeout=2)
            finally:
                await asyncio.to_thread(cluster.start_api)
            await wait_async(lambda: cache.fresh())
            assert cache.get(kinds.CONFIGMAPS, "a", namespace)

    asyncio.run(story())


# -- credentials


def test_a_plugin_is_asked_again_when_its_token_is_revoked(
    cluster: Any, namespace: str, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        cluster.kubectl("-n", namespace, "create", "serviceaccount", name)
    cluster.kubectl("-n", namespace, "create", "secret", "generic", "bound")
    bound = ["--bound-object-kind=Secret", "--bound-object-name=bound"]
    (tmp_path / "0").write_text(cluster.kubectl("-n", namespace, "create", "token", "one", *bound).strip())
    (tmp_path / "1").write_text(cluster.kubectl("-n", namespace, "create", "token", "two").strip())
    program = (
        "import json, pathlib; here = pathlib.Path({here!r}); run = len(list(here.glob('run-*')));"
        "(here / f'run-{{run}}').touch(); token = (here / str(min(run, 1))).read_text();"
        "print(json.dumps({{'apiVersion': 'client.authentication.k8s.io/v1', 'kind': 'ExecCredential',"
        " 'status': {{'token': token}}}}))"
    )
    content = yaml.safe_load(cluster.kubeconfig.read_text())
    content["users"][0]["user"] = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": ["-c", program.format(here=str(tmp_path))],
            "interactiveMode": "Never",
        }
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(content))

    async def story() -> None:
        async with client(path) as kube:
            first = await whoami(kube)
            assert first.endswith(":one")
            await asyncio.to_thread(cluster.kubectl, "-n", namespace, "delete", "secret", "bound")
            async with asyncio.timeout(120):
                while (name := await whoami(kube)) == first:
                    await asyncio.sleep(0.5)
            assert name.endswith(":two") and len(list(tmp_path.glob("run-*"))) == 2

    asyncio.run(story())


async def whoami(kube: Kube) -> str:
    review = {"apiVersion": REVIEWS.api, "kind": REVIEWS.name, "metadata": {}}
    return str((await kube.create(REVIEWS, review))["status"]["userInfo"]["username"])


def test_a_forbidden_request_differs_from_a_bad_token(cluster: Any, namespace: str, tmp_path: Path) -> None:
    token = cluster.kubectl("-n", namespace, "create", "token", "default").strip()
    content = yaml.safe_load(cluster.kubeconfig.read_text())
    path = tmp_path / "kubeconfig"

    async def story(value: str) -> None:
        content["users"][0]["user"] = {"token": value}
        path.write_text(yaml.safe_dump(content))
        async with client(path) as kube:
            await kube.snapshot(kinds.NODES)

    with pytest.raises(KubeError, match="cannot list resource") as forbidden:
        asyncio.run(story(token))
    assert forbidden.value.status == 403
    with pytest.raises(KubeUnavailable, match="does not accept the credentials"):
        asyncio.run(story("nonsense"))


# -- into pods


@pytest.fixture(scope="module")
def python_image(cluster: Any) -> str:
    if "root" in cluster.images:
        return str(cluster.images["root"])
    from images import build_test_images

    return build_test_images(cluster.registry)["root"]


@pytest.fixture
def served(cluster: Any, namespace: str, python_image: str) -> Iterator[ssl.SSLContext]:
    """A pod `server` with a certificate for `courier`, and the context that trusts it."""
    ca = trustme.CA()
    issued = ca.issue_cert("courier")
    files = {"server.py": SERVER.read_bytes(), "tls.pem": issued.private_key_and_cert_chain_pem.bytes()}
    made = pod("server", python_image, "exec python3 /probe/server.py")
    made["spec"]["volumes"] = [{"name": "probe", "secret": {"secretName": "probe"}}]
    made["spec"]["containers"][0]["volumeMounts"] = [{"name": "probe", "mountPath": "/probe"}]
    made["spec"]["containers"][0]["readinessProbe"] = {"tcpSocket": {"port": 7448}, "periodSeconds": 1}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "probe"},
        "data": {name: base64.b64encode(content).decode() for name, content in files.items()},
    }
    listed = {"apiVersion": "v1", "kind": "List", "items": [secret, made]}
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(listed))
    cluster.kubectl("-n", namespace, "wait", "--for=condition=Ready", "pod/server", "--timeout=180s")
    context = ssl.create_default_context()
    ca.configure_trust(context)
    yield context


async def again(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Repeat a request whose answer was cut off, as callers do. On a busy machine the API server may lose
    its connection to the pod."""
    for _ in range(2):
        with contextlib.suppress(Disconnected):
            return await ask()
    return await ask()


def test_the_pod_proxy(cluster: Any, namespace: str, served: ssl.SSLContext) -> None:
    async def story() -> None:
        async with client(cluster.kubeconfig) as kube:
            root = f"/api/v1/namespaces/{namespace}/pods/https:server:7447/proxy"
            headers = {"Stoker-Session": "s", "Authorization": "Bearer mine", "X-Other": "o"}
            seen = (await kube.request("GET", f"{root}/a%2Fb?c=%2Fd", headers=headers)).json()
            assert seen["path"] == "/a/b?c=%2Fd", "the proxy decodes paths, but not queries"
            assert (seen["headers"]["Stoker-Session"], seen["headers"]["X-Other"]) == ("s", "o")
            assert "Authorization" not in seen["headers"]
            body = bytes(range(256)) * 32768
            answer = await again(lambda: kube.request("POST", f"{root}/echo", body=body))
            assert answer.status == 200 and answer.body == body and answer.headers["stoker-mac"] == "kept"
            waited = await kube.request("GET", f"{root}/wait?seconds=15", timeout=60)
            assert waited.status == 200
            refused = await kube.request("GET", f"{root}/x".replace("7447", "7000"), timeout=60)
            assert refused.status == 503

    asyncio.run(story())


def test_port_forward_with_our_own_tls(cluster: Any, namespace: str, served: ssl.SSLContext) -> None:
    async def story() -> None:
        async with client(cluster.kubeconfig) as kube:
            reader, writer = await kube.forward(
                namespace, "server", 7447, ssl=served, server_hostname="courier"
            )
            body = bytes(range(256)) * 32768
            writer.write(f"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            writer.write(body)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"200" in head and await reader.readexactly(len(body)) == body
            writer.close()
            with pytest.raises(KubeUnavailable, match="port-forward"):
                await kube.forward(namespace, "server", 7447, ssl=served, server_hostname="other")
            reader, writer = await kube.forward(namespace, "server", 7000)
            async with asyncio.timeout(60):
                assert await reader.read() == b"", "no listener at this port"
            writer.close()
            with pytest.raises(KubeError, match="not found") as absent:
                await kube.forward(namespace, "nobody", 7447)
            assert absent.value.absent

    asyncio.run(story())


def test_exec_and_logs(cluster: Any, namespace: str, served: ssl.SSLContext) -> None:
    async def story() -> None:
        async with client(cluster.kubeconfig) as kube:
            ended = await kube.exec(
                namespace, "server", "main", ["sh", "-c", "echo out; echo err >&2; exit 7"]
            )
            assert (ended.code, ended.stdout, ended.stderr) == (7, b"out\n", b"err\n")
            body = bytes(range(256)) * 4096
            ended = await kube.exec(namespace, "server", "main", ["cat"], stdin=body)
            assert (ended.code, ended.stdout == body) == (0, True)
            with pytest.raises(KubeError, match="no-such-program"):
                await kube.exec(namespace, "server", "main", ["no-such-program"])
            with pytest.raises(KubeError, match="container nobody is not valid"):
                await kube.exec(namespace, "server", "nobody", ["true"])
            whole = b"".join([piece async for piece in kube.logs(namespace, "server", "main")])
            assert whole == b"serving\n"
            async with contextlib.aclosing(kube.logs(namespace, "server", "main", follow=True)) as pieces:
                assert await anext(pieces) == b"serving\n"
            with pytest.raises(KubeError, match="previous terminated container"):
                await anext(kube.logs(namespace, "server", "main", previous=True))

    asyncio.run(story())
