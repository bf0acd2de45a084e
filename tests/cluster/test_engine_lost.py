"""Lost nodes, frozen couriers, broken networks: silence is reported as silence, and death as death."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from engine_parts import Stage, attempt_of, image, phase, play, seen, started
from harness import Cluster

from stoker.engine.base import Observation, Presence
from stoker.errors import EngineError

pytestmark = pytest.mark.timeout(900)
POD = "digits-7f3k-1-worker-0"


@pytest.fixture
def stage(own_cluster: Cluster, namespace: str, tmp_path: Path) -> Stage:
    image(own_cluster, "nonroot")  # the first call builds it
    return Stage(own_cluster, namespace, tmp_path)


def silent(found: Observation) -> bool:
    return found.presence is Presence.SILENT


def alive(found: Observation) -> bool:
    return found.presence is Presence.ALIVE and not found.waiting


@pytest.mark.soak
def test_a_lost_node_is_silence_and_its_return_is_proof(own_cluster: Cluster, stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            handle, directory = await started(engine, attempt_of(stage.job()), ["sleep", "1000"])
            await phase(directory, "running")
            node = (await seen(engine, alive, "the task")).node
            own_cluster.lose_node(node)
            try:
                found = await seen(
                    engine, lambda one: silent(one) and one.node_ready is False, "the node to be missed"
                )
                assert (found.node, found.cause) == (node, "")
                assert node not in {one.name for one in await engine.capacity() if one.ready}
                with pytest.raises(EngineError, match=f"node {node}, which does not respond"):
                    await engine.stop(handle, grace=timedelta(0))
                assert silent((await engine.observe())[0]), "the order to end is no proof that it ended"
            finally:
                own_cluster.restore_node(node)
            found = await seen(engine, lambda one: one.presence is Presence.GONE, "the proof")
            assert found.proof

    play(story)


@pytest.mark.soak
def test_a_node_that_was_removed_from_the_cluster(own_cluster: Cluster, stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine() as engine:
            await started(engine, attempt_of(stage.job()), ["sleep", "1000"])
            node = (await seen(engine, alive, "the task")).node
            own_cluster.lose_node(node)
            try:
                await seen(engine, silent, "silence")
                own_cluster.kubectl("delete", "node", node)
                found = await seen(engine, lambda one: one.presence is Presence.GONE, "the proof")
                assert found.cause == "lost", found
                await stage.keep(engine, "node-removed")
            finally:
                own_cluster.restore_node(node)

    play(story)


@pytest.mark.soak
def test_a_courier_that_stands_still(own_cluster: Cluster, stage: Stage) -> None:
    async def story() -> None:
        async with stage.engine(silent_after=5) as engine:
            _, directory = await started(engine, attempt_of(stage.job()), ["sleep", "1000"])
            await phase(directory, "running")
            await seen(engine, alive, "the task")
            own_cluster.freeze(POD, "courier", stage.namespace)
            try:
                found = await seen(engine, silent, "silence")
                assert found.node_ready is True and "courier has not answered" in found.proof
            finally:
                own_cluster.thaw(POD, "courier", stage.namespace)
            await seen(engine, alive, "the task to answer again")

    play(story)


@pytest.mark.parametrize("reach", ["direct", pytest.param("auto", marks=pytest.mark.soak)])
def test_a_pod_that_is_cut_off(own_cluster: Cluster, stage: Stage, reach: str) -> None:
    async def story() -> None:
        async with stage.engine(silent_after=5, reach=reach) as engine:
            _, directory = await started(engine, attempt_of(stage.job()), ["sleep", "1000"])
            await phase(directory, "running")
            await seen(engine, alive, "the task")
            address = stage.kubectl("get", "pod", POD, "-o", "jsonpath={.status.podIP}")
            own_cluster.cut(address)
            try:
                if reach == "direct":
                    found = await seen(engine, silent, "silence")
                    assert found.node_ready is True
            finally:
                own_cluster.heal(address)
            await seen(engine, alive, "the task to answer again")

    play(story)


@pytest.mark.soak
def test_an_api_server_that_is_away_is_not_the_tasks_fault(own_cluster: Cluster, stage: Stage) -> None:
    """No task is reported while the API server is away; afterwards the observations are as before."""

    async def story() -> None:
        async with stage.engine() as engine:
            _, directory = await started(engine, attempt_of(stage.job()), ["sleep", "1000"])
            before = await phase(directory, "running")
            own_cluster.stop_api()
            try:
                for _ in range(3):
                    try:
                        assert all(found.presence is not Presence.GONE for found in await engine.observe())
                    except EngineError:
                        continue
            finally:
                own_cluster.start_api()
            found = await seen(engine, alive, "the task")
            assert found.presence is Presence.ALIVE
            after = directory.status()
            assert after is not None and after.pid == before.pid

    play(story)
