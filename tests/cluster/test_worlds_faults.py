"""Faults of nodes, pods and servers under a run of several tasks, and the resulting states.

The trainings print a line for every body that started. Their final value shows whether any step was lost,
done twice, or mixed with another world's.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bodies import Body, bodies, hurry
from boxes import ClusterBox
from faulting import box
from rooms import fill

from support.gangs import WORLDS, begin, check, checkpointed, generation, lines, sizes, starts, trains
from support.waiting import wait

__all__ = ["box"]

pytestmark = pytest.mark.timeout(900)

SMALL = ("--cluster", "lab", "--cpu", "0.1", "--memory", "128Mi", "--grace", "2s")
MINE = "stoker.dev/test-node"
"""Label of the node where a test wants pods."""
APART = {
    "spec": {
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "DoNotSchedule",
                "nodeTaintsPolicy": "Honor",
                "labelSelector": {"matchLabels": {"test": "apart"}},
            }
        ]
    },
    "metadata": {"labels": {"test": "apart"}},
}
"""No two on one node while another node accepts pods."""


def pods(box: ClusterBox, run: str) -> dict[str, dict[str, Any]]:
    """Pods by task, without those that are being deleted."""
    return {
        pod["metadata"]["labels"]["stoker.dev/task"]: pod
        for pod in box.pods(run)
        if not pod["metadata"].get("deletionTimestamp")
    }


def uids(box: ClusterBox, run: str) -> dict[str, str]:
    return {task: pod["metadata"]["uid"] for task, pod in pods(box, run).items()}


def ranks(box: ClusterBox, run: str) -> list[tuple[int, int]]:
    """(generation, rank) of every body that started."""
    return sorted((body["generation"], body["rank"]) for body in starts(box, run))


def incarnations(box: ClusterBox, run: str) -> dict[str, int]:
    return {task["name"]: task["incarnation"] for task in box.show(run)["attempts"][-1]["tasks"]}


def test_a_node_is_lost_with_one_member_on_it(box: ClusterBox) -> None:
    """The next world has a replacement on the other node and starts from the newest checkpoint."""
    flags = ("--workers", "2", "--lost-after", "10s", "--pod", json.dumps(APART))
    run = begin(box, *SMALL, *flags, steps=150, pause=0.1)
    box.until(run, "running", limit=180)
    checkpointed(box, run)
    before = pods(box, run)
    nodes = {task: pod["spec"]["nodeName"] for task, pod in before.items()}
    assert len(set(nodes.values())) == 2, nodes
    box.cluster.lose_node(nodes["worker-1"])
    try:
        seen = check(box, run, 2, steps=150)
        assert (len(seen["attempts"]), seen["attempts"][0]["generation"]) == (1, 2)
        assert ranks(box, run) == [(1, 0), (1, 1), (2, 0), (2, 1)]
        assert len({body["step"] for body in starts(box, run) if body["generation"] == 2}) == 1
        assert all(body["step"] > 0 for body in starts(box, run) if body["generation"] == 2)
        tasks = {task["name"]: task for task in seen["attempts"][0]["tasks"]}
        assert {name: task["incarnation"] for name, task in tasks.items()} == {"worker-0": 1, "worker-1": 2}
        assert {task["node"] for task in tasks.values()} == {f"lab/{nodes['worker-0']}"}
    finally:
        box.cluster.restore_node(nodes["worker-1"])
    wait(lambda: not box.pods(run), limit=180)


@pytest.mark.soak
def test_an_elastic_run_goes_on_without_a_lost_member_until_there_is_room(box: ClusterBox) -> None:
    """An elastic run continues with fewer members. When the node is back, another member joins."""
    keep, lose = box.cluster.nodes
    fill(box, keep, leave=2)
    fill(box, lose, leave=1)
    run = begin(box, *SMALL, "--workers", "2..3", "--lost-after", "10s", steps=2000, pause=0.5)
    box.until(run, "running", limit=180)
    trains(box, run, 1, 3)
    before = pods(box, run)
    (lost,) = [task for task, pod in before.items() if pod["spec"]["nodeName"] == lose]
    box.cluster.lose_node(lose)
    try:
        trains(box, run, 2, 2)
    finally:
        box.cluster.restore_node(lose)
    trains(box, run, 3, 3)
    after = uids(box, run)
    for task, pod in before.items():
        assert (after[task] == pod["metadata"]["uid"]) == (task != lost)
    assert len({body.pid for body in bodies(run)}) == 3, "the lost body runs beside them"
    hurry(run)
    seen = check(box, run, 3, steps=2000)
    assert sizes(box, run) == {1: 3, 2: 2, 3: 3}
    assert (len(seen["attempts"]), seen["attempts"][0]["generation"]) == (1, 3)
    wait(lambda: not box.pods(run), limit=180)


@contextmanager
def labelled(box: ClusterBox, node: str) -> Iterator[None]:
    box.kubectl("label", "node", node, f"{MINE}=yes", "--overwrite")
    try:
        yield
    finally:
        for one in box.cluster.nodes:
            box.kubectl("label", "node", one, f"{MINE}-")


def orphaned(body: Body) -> dict[str, Any]:
    """The attempts of a member that went on after its world had ended; empty before the first."""
    try:
        found: dict[str, Any] = json.loads((body.workdir / "orphaned.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def test_a_silent_node_and_a_frozen_member_are_fenced(box: ClusterBox) -> None:
    """The agents of a node are gone; one member there trains on, the other is frozen. No replacement
    starts before `lost_after`. Nothing that the old members do counts, not even after a thaw."""
    for script in (WORLDS, Path(__file__).with_name("ghosts.py")):
        shutil.copy(script, box.work / script.name)
    keep, lose = box.cluster.nodes
    job = {
        "name": "orphaned",
        "cluster": "lab",
        "run": ["python3", "ghosts.py", "200", "5", "0.1", "600"],
        "resources": {"cpu": 0.1, "memory": "128Mi"},
        "grace": "2s",
        "lost_after": "15s",
        "workers": 2,
        "framework": "none",
        "roles": {
            "chief": {
                "pod": {"spec": {"nodeSelector": {"kubernetes.io/hostname": keep}}},
                "resources": {"cpu": 0.1, "memory": "128Mi"},
            }
        },
        "pod": {"spec": {"nodeSelector": {MINE: "yes"}}},
    }
    box.write("stoker.yaml", json.dumps(job))
    with labelled(box, lose):
        run = str(box.json("submit", "-d", "stoker.yaml")["id"])
        box.until(run, "running", limit=180)
        checkpointed(box, run)
        before = pods(box, run)
        assert {task: pod["spec"]["nodeName"] for task, pod in before.items()} == {
            "chief-0": keep,
            "worker-0": lose,
            "worker-1": lose,
        }
        old = {body.task: body for body in bodies(run) if body.task != "chief-0"}
        frozen = before["worker-1"]["metadata"]["name"]
        cut = time.monotonic()
        box.cluster.orphan_node(lose)
        try:
            box.kubectl("label", "node", lose, f"{MINE}-")
            box.kubectl("label", "node", keep, f"{MINE}=yes", "--overwrite")
            for container in ("main", "courier"):
                box.cluster.freeze(frozen, container, box.namespace)
            while True:
                there = set(uids(box, run).values())
                if generation(box, run) > 1:
                    break
                assert there <= {pod["metadata"]["uid"] for pod in before.values()}, "a task has two pods"
                assert time.monotonic() - cut < 300, "the silent tasks are not replaced"
                time.sleep(0.2)
            assert time.monotonic() - cut >= 15, "not before the rules allow it"
            wait(lambda: orphaned(old["worker-0"]).get("tries", 0) >= 5, limit=180)
            box.cluster.thaw(frozen, "main", box.namespace)
            wait(lambda: orphaned(old["worker-1"]).get("tries", 0) >= 5, limit=180)
            wait(lambda: (2, 2) in ranks(box, run), limit=240)
            tried = {task: orphaned(body) for task, body in old.items()}
            box.kill_server()
            box.cluster.thaw(frozen, "courier", box.namespace)  # it now receives the requests of the meantime
            seen = check(box, run, 3, steps=200)
        finally:
            for container in ("courier", "main"):
                box.cluster.thaw(frozen, container, box.namespace)
            box.cluster.restore_node(lose)
    assert all(found["accepted"] == 0 for found in tried.values()), tried
    assert (len(seen["attempts"]), seen["attempts"][0]["generation"]) == (1, 2)
    assert ranks(box, run) == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    assert incarnations(box, run) == {"chief-0": 1, "worker-0": 2, "worker-1": 2}
    assert not [line for line in lines(box, run) if "ghost" in line]
    assert not [key["key"] for key in box.client().metrics(run)["keys"] if "orphaned" in key["key"]]
    assert not [row["name"] for row in seen["checkpoints"] if "9000" in row["name"]]
    assert not [file["path"] for file in box.client().files(run)["files"] if "ghost" in file["path"]]
    wait(lambda: not box.pods(run), limit=180)


SERVES = """
import os, time, uuid
role, index = os.environ["STOKER_ROLE"], os.environ["STOKER_TASK_INDEX"]
print("began", f"{role}-{index}", os.environ["STOKER_GENERATION"], uuid.uuid4().hex, flush=True)
while not os.path.exists("enough"):
    time.sleep(0.1)
print("done", f"{role}-{index}", flush=True)
"""


def test_a_task_that_comes_back_alone_leaves_the_others_as_they_are(box: ClusterBox) -> None:
    """`on_loss: task`: the pod of a parameter server is deleted, and the other tasks are not affected."""
    box.write("serves.py", SERVES)
    job = {
        "name": "served",
        "cluster": "lab",
        "run": ["python3", "serves.py"],
        "resources": {"cpu": 0.1, "memory": "128Mi"},
        "grace": "2s",
        "workers": 2,
        "framework": "none",
        "roles": {"ps": {"on_loss": "task", "resources": {"cpu": 0.1, "memory": "128Mi"}}},
    }
    box.write("stoker.yaml", json.dumps(job))
    run = str(box.json("submit", "-d", "stoker.yaml")["id"])
    wait(lambda: len(began(box, run)), lambda count: count == 3, limit=180)
    before, alive = pods(box, run), {body.task: body for body in bodies(run)}
    assert set(alive) == {"worker-0", "worker-1", "ps-0"}
    box.kubectl("delete", "pod", before["ps-0"]["metadata"]["name"], "--wait=false")
    wait(lambda: len(began(box, run)), lambda count: count == 4, limit=240)
    after, now = pods(box, run), {body.task: body for body in bodies(run)}
    for task in ("worker-0", "worker-1"):
        assert after[task]["metadata"]["uid"] == before[task]["metadata"]["uid"]
        assert restarts(after[task]) == 0
        assert now[task] == alive[task], "not the same process"
    assert after["ps-0"]["metadata"]["uid"] != before["ps-0"]["metadata"]["uid"]
    assert now["ps-0"].generation == 2
    for task in ("worker-0", "worker-1"):
        (now[task].workdir / "enough").touch()
    seen = box.ended(run, limit=180)
    assert (seen["state"], len(seen["attempts"])) == ("succeeded", 1), "it had no retries to spend"
    assert incarnations(box, run) == {"worker-0": 1, "worker-1": 1, "ps-0": 2}
    assert sorted((task, number) for task, number, _ in began(box, run)) == [
        ("ps-0", "1"),
        ("ps-0", "2"),
        ("worker-0", "1"),
        ("worker-1", "1"),
    ]


def began(box: ClusterBox, run: str) -> list[tuple[str, str, str]]:
    """Task, generation and process id word of every process that started."""
    found = [line.partition("began ")[2].split() for line in lines(box, run) if "began " in line]
    return [(task, number, word) for task, number, word in found]


def restarts(pod: dict[str, Any]) -> int:
    return sum(status["restartCount"] for status in pod["status"]["containerStatuses"])


@pytest.mark.soak
def test_a_server_that_is_killed_while_a_world_forms_and_forms_again(box: ClusterBox) -> None:
    """The server is killed at every moment between an action and its record, in either order."""
    run = begin(box, *SMALL, "--workers", "2", steps=400, pause=0.1)
    wait(lambda: box.pods(run), limit=180)
    killed(box)  # it has created pods
    wait(lambda: [pod for pod in box.pods(run) if pod["status"].get("podIP")], limit=180)
    killed(box)  # some have an address
    wait(lambda: bodies(run), limit=180)
    killed(box)  # it is giving orders
    checkpointed(box, run)
    first = uids(box, run)
    assert ranks(box, run) == [(1, 0), (1, 1)]
    box.kubectl("delete", "pod", pods(box, run)["worker-1"]["metadata"]["name"], "--wait=false")
    wait(lambda: {body.task for body in bodies(run)} != {"worker-0", "worker-1"}, limit=180)
    killed(box)  # it was about to observe the loss
    wait(lambda: generation(box, run) == 2, limit=180)
    killed(box)  # it has recorded the next generation
    wait(lambda: uids(box, run).get("worker-1", first["worker-1"]) != first["worker-1"], limit=180)
    killed(box)  # it has created the replacement's pod
    wait(lambda: [body for body in bodies(run) if body.generation == 2], limit=180)
    killed(box)  # it is giving orders again
    seen = check(box, run, 2, steps=400)
    assert (len(seen["attempts"]), seen["attempts"][0]["generation"]) == (1, 2)
    assert ranks(box, run) == [(1, 0), (1, 1), (2, 0), (2, 1)], "nothing started twice"
    assert all(body["step"] > 0 for body in starts(box, run) if body["generation"] == 2)
    assert incarnations(box, run) == {"worker-0": 1, "worker-1": 2}


def killed(box: ClusterBox) -> None:
    """kill -9, and another server takes over."""
    assert box.kill_server()
    box("ps")


SLOT = 10 << 30
"""Bytes of disk that one task of `rivals` requests. The cluster counts disk space, but the queue does not."""


def filled(box: ClusterBox, node: str) -> None:
    """A pod of another owner leaves room for one task on the node."""
    there = box.kubectl("get", "node", node, "-o", "jsonpath={.status.allocatable.ephemeral-storage}")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"other-{node}"},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "other",
                    "image": box.cluster.images["pause"],
                    "resources": {"requests": {"ephemeral-storage": str(int(there) - SLOT * 3 // 2)}},
                }
            ],
        },
    }
    box.cluster.kubectl("-n", box.namespace, "apply", "-f", "-", input=json.dumps(pod))
    ready = ("get", "pod", f"other-{node}", "-o", "jsonpath={.status.phase}")
    wait(lambda: box.kubectl(*ready) == "Running", limit=180)


def rival(box: ClusterBox, name: str, chief: str, worker: str) -> str:
    """A run of two tasks, one on the node with each label."""
    there = {"cpu": 0.1, "memory": "128Mi", "disk": "10Gi"}
    job = {
        "name": name,
        "cluster": "lab",
        "run": ["python3", "worlds.py", "20", "5", "0.1"],
        "resources": there,
        "grace": "2s",
        "start_within": "45s",
        "framework": "none",
        "roles": {"chief": {"pod": {"spec": {"nodeSelector": {chief: "yes"}}}, "resources": there}},
        "pod": {"spec": {"nodeSelector": {worker: "yes"}}},
    }
    box.write(f"{name}.yaml", json.dumps(job))
    return str(box.json("submit", "-d", f"{name}.yaml")["id"])


def test_of_two_that_hold_half_of_what_both_need_one_lets_go(box: ClusterBox) -> None:
    """Both runs seem to fit. Each has one of its two tasks up, in the other one's place."""
    shutil.copy(WORLDS, box.work)
    one, two = box.cluster.nodes
    here, there, later = (f"{MINE}-{word}" for word in ("here", "there", "later"))
    for node in (one, two):
        filled(box, node)
    try:
        box.kubectl("label", "node", one, f"{here}=yes")
        first = rival(box, "first", here, later)
        wait(lambda: on_nodes(box, first) == {"chief-0": one}, limit=180)
        box.kubectl("label", "node", two, f"{there}=yes")
        second = rival(box, "second", there, here)
        wait(lambda: on_nodes(box, second) == {"chief-0": two}, limit=180)
        box.kubectl("label", "node", two, f"{later}=yes")
        seen = {run: box.ended(run, limit=300) for run in (first, second)}
    finally:
        for node in (one, two):
            box.kubectl("label", "node", node, *(f"{label}-" for label in (here, there, later)))
    for run in (first, second):
        check(box, run, 2, steps=20)
        assert seen[run]["state"] == "succeeded"
    assert len(seen[first]["attempts"]) == 1, "the first run is not asked to release its tasks"
    assert len(seen[second]["attempts"]) >= 2
    assert first in seen[second]["attempts"][0]["evidence"]["message"]
    assert {body["attempt"] for body in starts(box, second)} == {len(seen[second]["attempts"])}


def on_nodes(box: ClusterBox, run: str) -> dict[str, str]:
    """The nodes of the tasks that have one."""
    return {
        task: pod["spec"]["nodeName"] for task, pod in pods(box, run).items() if pod["spec"].get("nodeName")
    }
