"""The cache of a cluster: its content, how it is updated, and when it reports that it is stale."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from stoker.engine.kubernetes.api import informer, kinds
from stoker.engine.kubernetes.api.client import Kube
from stoker.engine.kubernetes.api.informer import Informer, Select
from stoker.engine.kubernetes.api.kubeconfig import KubeConfig
from stoker.errors import EngineUnavailable
from support.kubernetes.kubeapi import Api, kubeconfig, status
from support.waiting import wait_async


@contextlib.asynccontextmanager
async def mirrored(
    tmp_path: Path, ca: trustme.CA, *selects: Any, **options: Any
) -> AsyncIterator[tuple[Api, Informer, Kube]]:
    api = Api(ca)
    await api.start()
    kube = Kube.from_config(KubeConfig.load(kubeconfig(tmp_path / "config", api.url, ca)))
    made = Informer(kube, selects or (kinds.PODS,), **options)
    try:
        yield api, made, kube
    finally:
        await made.close()
        assert api.watching == 0 or await gone(api)
        await kube.close()
        await api.stop()


async def gone(api: Api) -> bool:
    await wait_async(lambda: api.watching == 0)
    return True


def names(made: Informer) -> list[str]:
    return sorted(obj["metadata"]["name"] for obj in made.list(kinds.PODS))


async def told(reader: informer.Changes, count: int) -> list[tuple[str, bool]]:
    found = []
    async with asyncio.timeout(60):
        while len(found) < count:
            change = await anext(reader)
            found.append((change.name, change.deleted))
    return found


def test_it_lists_then_watches(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with mirrored(tmp_path, ca) as (api, made, kube):
            api.page = 2
            for name in "abc":
                api.put("pods", name, metadata={"labels": {"run": name}})
            with pytest.raises(EngineUnavailable, match="pods have not been listed yet"):
                made.list(kinds.PODS)
            assert not made.fresh()
            reader = made.changes()
            made.start()
            await made.ready()
            assert names(made) == ["a", "b", "c"] and made.fresh() and made.problem() == ""
            assert await told(reader, 3) == [("a", False), ("b", False), ("c", False)]
            api.put("pods", "a", metadata={"labels": {"run": "z"}}, status={"phase": "Running"})
            api.remove("pods", "b")
            assert await told(reader, 2) == [("a", False), ("b", True)]
            found = made.get(kinds.PODS, "a")
            assert found is not None and found["status"] == {"phase": "Running"}
            assert "managedFields" not in found["metadata"]
            assert made.get(kinds.PODS, "b") is None
            assert [obj["metadata"]["name"] for obj in made.list(kinds.PODS, {"run": "c"})] == ["c"]
            assert made.get(kinds.PODS, "a", "elsewhere") is None
            assert dict(kube.calls) == {("list", "pods"): 2, ("watch", "pods"): 1}

    asyncio.run(story())


def test_several_kinds_namespaces_and_labels(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        ours = Select(kinds.PODS, namespace="", labels="app=stoker")
        theirs = Select(kinds.PODS, namespace="")
        async with mirrored(tmp_path, ca, ours, theirs, kinds.NODES, kinds.SECRETS, kinds.EVENTS) as (
            api,
            made,
            _,
        ):
            api.put("pods", "a", "one", metadata={"labels": {"app": "stoker"}})
            api.put("pods", "b", "two")
            api.put("nodes", "n", "")
            api.put("secrets", "s")
            api.put("secrets", "t", "elsewhere")
            api.put("events", "e")
            made.start()
            await made.ready()
            assert [pod["metadata"]["name"] for pod in made.list(ours)] == ["a"]
            assert len(made.list(theirs)) == 2
            with pytest.raises(ValueError, match="selected 2 times"):
                made.list(kinds.PODS)
            assert made.get(kinds.NODES, "n") is not None
            assert [obj["metadata"]["name"] for obj in made.list(kinds.SECRETS)] == ["s"]
            assert made.get(kinds.EVENTS, "e") is not None
            assert made.get(ours, "a", "one") is not None

    asyncio.run(story())


def test_objects_removed_during_an_outage_are_reported(tmp_path: Path, ca: trustme.CA) -> None:
    """The API server is down, loses its history, and comes back with other objects."""

    async def story() -> None:
        async with mirrored(tmp_path, ca) as (api, made, kube):
            for name in ("stays", "changes", "vanishes", "replaced"):
                api.put("pods", name)
            made.start()
            await made.ready()
            reader = made.changes()
            await api.stop()
            api.put("pods", "changes", spec={"x": 1})
            api.remove("pods", "vanishes")
            api.remove("pods", "replaced")
            api.put("pods", "replaced", spec={"x": 2})
            api.put("pods", "appears")
            api.compact()
            await wait_async(lambda: made.problem())
            assert names(made) == ["changes", "replaced", "stays", "vanishes"], "still known"
            await api.start()
            assert sorted(await told(reader, 5)) == [
                ("appears", False),
                ("changes", False),
                ("replaced", False),
                ("replaced", True),
                ("vanishes", True),
            ]
            assert names(made) == ["appears", "changes", "replaced", "stays"]
            assert made.problem() == ""
            assert kube.calls["list", "pods"] == 2

    asyncio.run(story())


def test_a_watch_continues_after_a_lost_connection(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with mirrored(tmp_path, ca) as (api, made, kube):
            made.start()
            await made.ready()
            await api.stop()
            api.put("pods", "a")
            await api.start()
            await wait_async(lambda: names(made) == ["a"])
            assert kube.calls["list", "pods"] == 1

    asyncio.run(story())


def test_history_that_is_compacted_under_a_watch_is_listed_again(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with mirrored(tmp_path, ca) as (api, made, kube):
            api.put("pods", "a")
            made.start()
            await wait_async(lambda: api.watching == 1)
            api.objects.pop(("pods", "default", "a"))
            api.compact()
            api.put("nodes", "n", "")
            await wait_async(lambda: names(made) == [])
            assert kube.calls["list", "pods"] == 2

    asyncio.run(story())


def test_silence_is_reported_and_never_read_as_an_empty_cluster(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with mirrored(tmp_path, ca, max_silence=2.0) as (api, made, _):
            api.put("pods", "a")
            made.start()
            await made.ready()
            await api.stop()
            await wait_async(lambda: not made.fresh())
            with pytest.raises(
                EngineUnavailable, match=r"nothing was heard of its pods for 2 s: .*no connection"
            ):
                made.list(kinds.PODS)
            with pytest.raises(EngineUnavailable):
                made.get(kinds.PODS, "a")
            await api.start()
            await wait_async(lambda: made.fresh())
            assert names(made) == ["a"]

    asyncio.run(story())


def test_a_quiet_cluster_stays_fresh(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with mirrored(tmp_path, ca, max_silence=6.0) as (api, made, kube):
            api.put("pods", "a")
            made.start()
            await made.ready()
            while kube.calls["watch", "pods"] < 3:
                assert names(made) == ["a"]
                await asyncio.sleep(0.05)
            assert kube.calls["list", "pods"] == 1

    asyncio.run(story())


def test_behind_a_proxy_that_drops_watches_it_polls(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with mirrored(tmp_path, ca, max_silence=3.0) as (api, made, kube):
            api.deaf = True
            made.start()
            await made.ready()
            for name in ("a", "b"):
                api.put("pods", name)
                await wait_async(lambda name=name: made.fresh() and name in names(made))
            assert kube.calls["list", "pods"] >= 3

    asyncio.run(story())


def test_a_server_that_never_answers_is_unavailable(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with mirrored(tmp_path, ca) as (api, made, _):
            api.silent = True
            made.start()
            with pytest.raises(EngineUnavailable):
                await made.ready(timeout=0.3)

    asyncio.run(story())


def test_forbidden_kinds_are_reported(
    tmp_path: Path, ca: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with mirrored(tmp_path, ca) as (api, made, _):
            for _ in range(50):
                api.scripts.append(lambda _request: status(403, "Forbidden", "you may not list pods"))
            made.start()
            with pytest.raises(EngineUnavailable, match="you may not list pods"):
                await made.ready(timeout=1)
            with pytest.raises(EngineUnavailable, match=r"not been listed yet: .*you may not list pods"):
                made.list(kinds.PODS)
            assert len(api.seen) < 10, "it waits longer and longer"

    with caplog.at_level(logging.WARNING):
        asyncio.run(story())
    assert caplog.text.count("you may not list pods") == 1


@pytest.mark.parametrize(
    "broken",
    [
        '{"type": "ADDED", "object": {"meta',
        '{"type": "ADDED", "object": {"kind": "Pod"}}\n',
        '{"type": "ERROR", "object": {"code": 500, "message": "trouble"}}\n',
        '{"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}\n',
        "<html>\n",
        "",
    ],
)
def test_broken_events_are_survived(tmp_path: Path, ca: trustme.CA, broken: str) -> None:
    async def story() -> None:
        async with mirrored(tmp_path, ca) as (api, made, _):

            def breaks(request: web.Request) -> web.Response | None:
                return web.Response(text=broken) if "watch" in request.query else None

            api.scripts += [breaks, breaks]
            made.start()
            await made.ready()
            api.put("pods", "a")
            await wait_async(lambda: api.scripts == [] and names(made) == ["a"])
            assert made.fresh()

    asyncio.run(story())


def test_our_own_writes_are_seen_at_once_and_never_undone_by_older_news(
    tmp_path: Path, ca: trustme.CA
) -> None:
    async def story() -> None:
        async with mirrored(tmp_path, ca) as (api, made, kube):
            made.start()
            await wait_async(lambda: api.watching == 1)
            first = await kube.create(kinds.PODS, {"metadata": {"name": "a"}, "spec": {"x": 1}})
            made.note(kinds.PODS, first)
            assert names(made) == ["a"]
            assert "managedFields" in first["metadata"], "the caller's own is left alone"
            second = await kube.patch(kinds.PODS, "a", {"spec": {"x": 2}})
            made.note(kinds.PODS, second)
            made.note(kinds.PODS, first)
            found = made.get(kinds.PODS, "a")
            assert found is not None and found["spec"] == {"x": 2}
            await kube.delete(kinds.PODS, "a")
            await wait_async(lambda: names(made) == [])
            made.note(kinds.PODS, second)
            assert names(made) == [], "the watch is past it"

    asyncio.run(story())


def test_changes_wait_once_per_object_and_end_with_the_cache(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with mirrored(tmp_path, ca) as (api, made, _):
            made.start()
            await made.ready()
            reader, dropped = made.changes(), weakref.ref(made.changes())
            gc.collect()
            assert dropped() is None, "a reader that is let go of is not fed for ever"
            for number in range(5):
                api.put("pods", "a", spec={"x": number})
            api.put("pods", "b")
            api.remove("pods", "a")
            api.put("pods", "a", spec={"x": "new"})
            await wait_async(lambda: (made.get(kinds.PODS, "a") or {}).get("spec") == {"x": "new"})
            assert sorted(await told(reader, 3)) == [("a", False), ("a", True), ("b", False)]
            await made.close()
            assert [change async for change in reader] == []

    asyncio.run(story())


def test_trim_decides_what_is_kept(tmp_path: Path, ca: trustme.CA) -> None:
    def trim(obj: dict[str, Any]) -> dict[str, Any]:
        return {"metadata": obj["metadata"]}

    async def story() -> None:
        async with mirrored(tmp_path, ca, trim=trim) as (api, made, _):
            api.put("pods", "a", spec={"big": 1})
            made.start()
            await made.ready()
            api.put("pods", "b", spec={"big": 1})
            await wait_async(lambda: names(made) == ["a", "b"])
            assert all("spec" not in pod for pod in made.list(kinds.PODS))

    asyncio.run(story())


def test_closing_is_prompt_in_every_state_and_leaves_no_task(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        for trouble in ("none", "deaf", "silent", "away"):
            async with mirrored(tmp_path, ca, kinds.PODS, kinds.NODES) as (api, made, kube):
                api.deaf, api.silent = trouble == "deaf", trouble == "silent"
                if trouble == "away":
                    await api.stop()
                made.start()
                await wait_async(
                    lambda api=api, kube=kube, away=trouble == "away": api.seen or (away and kube.calls)
                )
                async with asyncio.timeout(30):
                    await made.close()
                await kube.close()
                left = [task for task in asyncio.all_tasks() if "mirror" in repr(task.get_coro()).lower()]
                assert left == []

    asyncio.run(story())
