"""What nodes have for tasks of Stoker, and which jobs may use them."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.engine.base import Node
from stoker.engine.kubernetes import capacity, quantity
from stoker.engine.kubernetes.config import ClusterConfig
from stoker.engine.kubernetes.manifests import scheduling
from stoker.spec import Job


def node(name: str = "n1", *, gpus: int = 0, taints: Any = (), labels: Any = None, ready: str = "True", **more: Any) -> dict[str, Any]:  # fmt: skip
    allocatable = {
        "cpu": "8",
        "memory": "32Gi",
        **({"nvidia.com/gpu": str(gpus)} if gpus else {}),
        **more.pop("has", {}),
    }
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {
            "taints": [dict(zip(("key", "value", "effect"), taint, strict=True)) for taint in taints],
            **more,
        },
        "status": {
            "allocatable": allocatable,
            "conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}],
            "nodeInfo": {"bootID": "b"},
        },
    }


def pod(on: str, cpu: str = "0", memory: str = "0", gpu: int = 0, phase: str = "Running") -> dict[str, Any]:
    limits = {"nvidia.com/gpu": str(gpu)} if gpu else {}
    resources = {"requests": {"cpu": cpu, "memory": memory}, "limits": limits}
    return {"spec": {"nodeName": on, "containers": [{"resources": resources}]}, "status": {"phase": phase}}


def nodes(listed: list[dict[str, Any]], others: Any = (), **config: Any) -> dict[str, Node]:
    found = capacity.nodes("c", ClusterConfig.from_json(config), listed, others)
    return {one.name: one for one in found}


GPU_TAINT = ("nvidia.com/gpu", "present", "NoSchedule")


def test_requests_of_other_pods_are_subtracted() -> None:
    others = [
        pod("n1", "500m", "1Gi", 1),
        pod("n1", "1", "0"),
        pod("n2", "9"),
        pod("n1", "4", phase="Succeeded"),
    ]
    found = nodes([node(gpus=4), node("n2")], others)
    assert (found["n1"].cpu, found["n1"].memory, len(found["n1"].gpus)) == (6.5, 31 << 30, 3)
    assert found["n2"].cpu == 0.0, "never less than nothing"
    assert [gpu.id for gpu in found["n1"].gpus] == ["n1:gpu-0", "n1:gpu-1", "n1:gpu-2"]


def test_tags_restrict_a_node() -> None:
    pools = {
        "a100": {"selector": {"gpu": "a100"}},
        "spot": {"selector": {"spot": "yes"}, "tolerations": ["spot=yes:NoSchedule"]},
    }
    found = nodes(
        [
            node("plain"),
            node("gpu", gpus=1, taints=[GPU_TAINT]),
            node("a100", gpus=8, taints=[GPU_TAINT], labels={"gpu": "a100"}),
            node("spot", labels={"spot": "yes"}, taints=[("spot", "yes", "NoSchedule")]),
            node("spot-gpu", labels={"spot": "yes"}, taints=[("spot", "yes", "NoSchedule"), GPU_TAINT]),
            node("other", taints=[("dedicated", "them", "NoSchedule")]),
            node("control", taints=[("node-role.kubernetes.io/control-plane", "", "NoSchedule")]),
            node("soft", taints=[("x", "", "PreferNoSchedule")]),
            node("cordoned", unschedulable=True),
            node("away", ready="Unknown", taints=[("node.kubernetes.io/unreachable", "", "NoExecute")]),
        ],
        pools=pools,
    )
    assert {name: set(one.tags) for name, one in found.items()} == {
        "plain": {"c"},
        "gpu": {"c:gpu"},
        "a100": {"c:gpu", "c:pool:a100:gpu"},
        "spot": {"c:pool:spot"},
        "spot-gpu": {"c:pool:spot:gpu"},
        "soft": {"c"},
        "away": {"c"},
    }
    assert found["away"].ready is False and found["plain"].ready is True


@pytest.mark.parametrize(
    ("job", "welcome"),
    [
        ({}, {"plain"}),
        ({"resources": {"gpu": 1}}, {"plain", "gpu"}),
        ({"pool": "a100"}, set()),
        ({"pool": "a100", "resources": {"gpu": 1}}, {"gpu"}),
    ],
)
def test_jobs_find_their_nodes(job: dict[str, Any], welcome: set[str]) -> None:
    config = ClusterConfig.from_json({"pools": {"a100": {"selector": {"gpu": "a100"}}}})
    listed = [node("plain"), node("gpu", gpus=1, taints=[GPU_TAINT], labels={"gpu": "a100"})]
    wanted = scheduling.needs(Job.from_json({"run": "x", "image": "i", **job}), config, "c").among
    found = capacity.nodes("c", config, listed, ())
    assert {one.name for one in found if one.tags & wanted} == welcome


def test_a_pool_of_slices_offers_only_slices_and_only_to_jobs_that_name_it() -> None:
    config = {"gpu_profiles": {"small": "nvidia.com/mig-1g.10gb"}, "pools": {"mig": {"selector": {"mig": "on"}, "gpu_profile": "small"}}}  # fmt: skip
    found = nodes([node("m", labels={"mig": "on"}, has={"nvidia.com/mig-1g.10gb": "7"})], **config)
    assert len(found["m"].gpus) == 7 and found["m"].tags == {"c:pool:mig"}


def test_nodes_of_an_autoscaler() -> None:
    config = {"pools": {"big": {"selector": {"size": "big"}, "autoscale": {"max_nodes": 3, "cpu": 64, "memory": "256Gi", "gpu": 8}}}}  # fmt: skip
    found = nodes([node("n1"), node("b1", labels={"size": "big"})], **config)
    assert set(found) == {"n1", "b1", "new:big:1", "new:big:2"}
    assert (found["new:big:1"].cpu, len(found["new:big:1"].gpus)) == (64, 8)
    assert "c" not in found["new:big:1"].tags and "c:pool:big" in found["new:big:1"].tags


def test_a_cluster_that_does_not_show_its_nodes_counts_as_one() -> None:
    (whole,) = capacity.nodes("c", ClusterConfig(), None, ())
    assert whole.cpu > 10_000 and len(whole.gpus) > 1000 and {"c", "c:gpu"} <= whole.tags
    config = ClusterConfig.from_json(
        {"capacity": {"cpu": 100, "memory": "1Ti", "gpu": 4}, "pools": {"p": {}}}
    )
    (whole,) = capacity.nodes("c", config, None, ())
    assert (whole.cpu, whole.memory, len(whole.gpus)) == (100, 1 << 40, 4)
    assert {"c:pool:p", "c:pool:p:gpu"} <= whole.tags
    assert not scheduling._NODE.fullmatch(whole.name), "no pod is ever asked to prefer it"


def test_needs_count_the_courier() -> None:
    config = ClusterConfig()
    found = scheduling.needs(Job.from_json({"run": "x", "image": "i"}), config, "c")
    assert (found.cpu, found.memory, found.gpu) == (1.05, 96 << 20, 0)
    plain = Job.from_json({"image": "i", "launcher": "none", "resources": {"cpu": 2, "memory": "1Gi"}})
    assert (scheduling.needs(plain, config, "c").cpu, scheduling.needs(plain, config, "c").memory) == (
        2,
        1 << 30,
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", 0.5),
        ("2", 2),
        ("1e3", 1000),
        ("1Ki", 1024),
        ("1k", 1000),
        ("1.5Gi", 1.5 * (1 << 30)),
        ("100n", 1e-7),
        ("", 0),
        ("junk", 0),
        (None, 0),
        ("-1", -1),
    ],
)
def test_quantities(text: object, value: float) -> None:
    assert float(quantity.number(text)) == pytest.approx(value)


@pytest.mark.parametrize(("value", "shown"), [(0.25, "0.25 CPU"), (64, "64 CPU"), (1280, "1280 CPU")])
def test_cpus_in_a_message(value: float, shown: str) -> None:
    assert quantity.show_cores(value) == shown
