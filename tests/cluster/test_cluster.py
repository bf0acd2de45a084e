"""The test cluster itself: it is real, it enforces policies and quotas, and it can be broken and repaired."""

from __future__ import annotations

import json
import socket
import time

import pytest
from harness import HarnessError
from harness.api import until
from harness.layout import kubernetes_version
from harness.pods import address, apply, claim, get, phase, pod, running

FOREVER = "while true; do sleep 1; done"
LISTEN = "nc -ll -p 8000 -e echo hello"


def test_both_nodes_are_ready(cluster):
    seen = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    ready = {
        each["metadata"]["name"]
        for each in seen
        for condition in each["status"]["conditions"]
        if condition["type"] == "Ready" and condition["status"] == "True"
    }
    assert ready == set(cluster.nodes)
    assert len(ready) >= 2


def test_it_has_the_requested_version(own_cluster):
    wanted = f"v{kubernetes_version()}"
    assert own_cluster.api("GET", "/version")["gitVersion"] == wanted
    seen = json.loads(own_cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    assert {each["status"]["nodeInfo"]["kubeletVersion"] for each in seen} == {wanted}


def test_a_pod_pulls_runs_logs_and_takes_commands(cluster, namespace):
    apply(cluster, namespace, pod("hello", cluster.images["busybox"], f"echo from the pod; {FOREVER}"))
    running(cluster, namespace, "hello")
    until(lambda: cluster.kubectl("-n", namespace, "logs", "hello") == "from the pod\n", "its log")
    assert cluster.kubectl("-n", namespace, "exec", "hello", "--", "hostname") == "hello\n"
    status = get(cluster, namespace, "pod", "hello")["status"]["containerStatuses"][0]
    assert status["imageID"].startswith(cluster.registry)


def test_a_sidecar_starts_before_the_main_container_and_ends_after_it(cluster, namespace):
    image = cluster.images["busybox"]
    shared = {"volumeMounts": [{"name": "shared", "mountPath": "/shared"}]}
    aside = f"touch /shared/up; trap 'exit 0' TERM; {FOREVER}"
    beside = {
        "name": "beside",
        "image": image,
        "restartPolicy": "Always",
        "command": ["sh", "-c", aside],
        **shared,
    }
    both = pod(
        "both", image, "cat /shared/up && echo found", initContainers=[beside], volumes=[{"name": "shared"}]
    )
    beside["startupProbe"] = {"exec": {"command": ["cat", "/shared/up"]}, "periodSeconds": 1}
    both["spec"]["containers"][0].update(shared)
    both["spec"]["volumes"][0]["emptyDir"] = {}
    both["spec"]["terminationGracePeriodSeconds"] = 30
    apply(cluster, namespace, both)
    phase(cluster, namespace, "both", "Succeeded")
    assert cluster.kubectl("-n", namespace, "logs", "both", "-c", "main") == "found\n"
    status = get(cluster, namespace, "pod", "both")["status"]["initContainerStatuses"][0]
    assert status["state"]["terminated"]["exitCode"] == 0


def test_gpus_are_scheduled_and_run_out(cluster, namespace):
    image = cluster.images["busybox"]
    three, two = ({"limits": {"nvidia.com/gpu": amount}} for amount in (3, 2))
    apply(cluster, namespace, pod("large", image, FOREVER, resources=three))
    running(cluster, namespace, "large")
    assert get(cluster, namespace, "pod", "large")["spec"]["nodeName"] == cluster.nodes[1]
    apply(cluster, namespace, pod("waits", image, FOREVER, resources=two))

    def refused() -> bool:
        conditions = get(cluster, namespace, "pod", "waits")["status"].get("conditions", [])
        return any("Insufficient nvidia.com/gpu" in each.get("message", "") for each in conditions)

    until(refused, "the scheduler to say that GPUs have run out")
    cluster.kubectl("-n", namespace, "delete", "pod", "large")
    running(cluster, namespace, "waits")


def test_a_network_policy_keeps_others_out(cluster, namespace):
    image = cluster.images["busybox"]
    same_node = {"nodeName": cluster.nodes[0]}
    apply(
        cluster,
        namespace,
        pod("server", image, LISTEN, **same_node),
        pod("friend", image, FOREVER, **same_node),
        pod("stranger", image, FOREVER, **same_node),
        pod("afar", image, FOREVER, nodeName=cluster.nodes[1]),
    )
    running(cluster, namespace, "server", "friend", "stranger", "afar")
    server = address(cluster, namespace, "server")
    for name in ("friend", "stranger", "afar"):
        until(lambda name=name: reaches(cluster, namespace, name, server), f"{name} to get through")
    only_friends = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "only-friends"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "server"}},
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": {"app": "friend"}}}], "ports": [{"port": 8000}]}
            ],
        },
    }
    apply(cluster, namespace, only_friends)
    for name in ("stranger", "afar"):
        until(lambda name=name: not reaches(cluster, namespace, name, server), f"{name} to be kept out")
    until(lambda: reaches(cluster, namespace, "friend", server), "the friend to get through")
    cluster.kubectl("-n", namespace, "delete", "networkpolicy", "only-friends")
    until(lambda: reaches(cluster, namespace, "afar", server), "the way to be open again")


def test_a_network_policy_keeps_a_pod_in(cluster, namespace):
    image = cluster.images["busybox"]
    apply(cluster, namespace, pod("server", image, LISTEN), pod("client", image, FOREVER))
    running(cluster, namespace, "server", "client")
    server = address(cluster, namespace, "server")
    until(lambda: reaches(cluster, namespace, "client", server), "the client to get through")
    no_way_out = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "no-way-out"},
        "spec": {"podSelector": {"matchLabels": {"app": "client"}}, "policyTypes": ["Egress"]},
    }
    apply(cluster, namespace, no_way_out)
    until(lambda: not reaches(cluster, namespace, "client", server), "the pod to be kept in")


def test_a_service_has_an_address(own_cluster, namespace):
    image = own_cluster.images["busybox"]
    several = [pod(name, image, LISTEN, labels={"app": "server"}) for name in ("first", "second")]
    apply(own_cluster, namespace, *several, pod("client", image, FOREVER))
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "server"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    apply(own_cluster, namespace, service)
    running(own_cluster, namespace, "first", "second", "client")
    where = get(own_cluster, namespace, "service", "server")["spec"]["clusterIP"]
    until(lambda: reaches(own_cluster, namespace, "client", where, 80), "the service to answer a pod")
    assert greeting((where, 80)) == b"hello\n"
    until(lambda: reaches(own_cluster, namespace, "first", where, 80), "the service to be reached from a pod")
    for name in ("first", "second"):
        own_cluster.kubectl("-n", namespace, "delete", "pod", name)
    until(lambda: not reaches(own_cluster, namespace, "client", where, 80), "the service to be empty")


def test_a_volume_outlives_the_pod_that_wrote_to_it(own_cluster, namespace):
    image, name = own_cluster.images["busybox"], f"{namespace}-data"
    own_cluster.volume(name)
    volumes = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}
    mounts = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    writer = pod("writer", image, "echo kept > /data/file", nodeName=own_cluster.nodes[0], **volumes)
    reader = pod("reader", image, "cat /data/file", nodeName=own_cluster.nodes[1], **volumes)
    for each in (writer, reader):
        each["spec"]["containers"][0].update(mounts)
    apply(own_cluster, namespace, claim("data", name), writer)
    phase(own_cluster, namespace, "writer", "Succeeded")
    apply(own_cluster, namespace, reader)
    phase(own_cluster, namespace, "reader", "Succeeded")
    assert own_cluster.kubectl("-n", namespace, "logs", "reader") == "kept\n"


def test_a_pod_that_is_cut_off_is_silent_until_healed(own_cluster, namespace):
    apply(own_cluster, namespace, pod("server", own_cluster.images["busybox"], LISTEN))
    running(own_cluster, namespace, "server")
    where = (address(own_cluster, namespace, "server"), 8000)
    assert greeting(where) == b"hello\n"
    own_cluster.cut(where[0])
    try:
        with pytest.raises(TimeoutError):
            greeting(where, limit=3)
    finally:
        own_cluster.heal(where[0])
    assert greeting(where) == b"hello\n"


def test_a_frozen_container_stands_still_until_thawed(own_cluster, namespace):
    apply(own_cluster, namespace, pod("server", own_cluster.images["busybox"], LISTEN))
    running(own_cluster, namespace, "server")
    where = (address(own_cluster, namespace, "server"), 8000)
    assert greeting(where) == b"hello\n"
    own_cluster.freeze("server", "main", namespace)
    try:
        with pytest.raises(TimeoutError):
            greeting(where, limit=3)
    finally:
        own_cluster.thaw("server", "main", namespace)
    assert greeting(where) == b"hello\n"


@pytest.mark.parametrize("freeze", [False, True], ids=["ended", "hanging"])
def test_the_api_server_goes_and_comes_back_and_pods_do_not_notice(own_cluster, namespace, freeze):
    apply(own_cluster, namespace, pod("steady", own_cluster.images["busybox"], FOREVER))
    running(own_cluster, namespace, "steady")
    own_cluster.stop_api(freeze=freeze)
    try:
        with pytest.raises(HarnessError, match=r"refused|timeout|Timeout|deadline"):
            own_cluster.kubectl("-n", namespace, "get", "pod", "steady", "--request-timeout=2s")
    finally:
        own_cluster.start_api()
    status = get(own_cluster, namespace, "pod", "steady")["status"]["containerStatuses"][0]
    assert status["restartCount"] == 0
    assert "running" in status["state"]


def test_versions_before_a_compaction_are_gone(own_cluster, namespace):
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    before = own_cluster.api("GET", path)["metadata"]["resourceVersion"]
    for number in range(3):
        own_cluster.kubectl("-n", namespace, "create", "configmap", f"change-{number}")
    own_cluster.compact()
    status, said = own_cluster.api.raw("GET", f"{path}?watch=true&timeoutSeconds=5&resourceVersion={before}")
    assert (status == 410) or (json.loads(said.splitlines()[0])["object"]["code"] == 410)


def test_a_lost_node_takes_its_pods_along_and_comes_back(own_cluster, namespace):
    lost = own_cluster.nodes[1]
    apply(own_cluster, namespace, pod("gone", own_cluster.images["busybox"], LISTEN, nodeName=lost))
    running(own_cluster, namespace, "gone")
    where = (address(own_cluster, namespace, "gone"), 8000)
    assert greeting(where) == b"hello\n"
    own_cluster.lose_node(lost)
    try:
        with pytest.raises(OSError):
            greeting(where, limit=3)
        until(lambda: not is_ready(own_cluster, lost), f"{lost} to be missed")
    finally:
        own_cluster.restore_node(lost)
    assert is_ready(own_cluster, lost)
    assert get(own_cluster, "default", "node", lost)["status"]["capacity"]["nvidia.com/gpu"] == "4"
    apply(own_cluster, namespace, pod("again", own_cluster.images["busybox"], FOREVER, nodeName=lost))
    running(own_cluster, namespace, "again")


def test_an_orphaned_node_runs_on_unseen(own_cluster, namespace):
    lost = own_cluster.nodes[0]
    apply(own_cluster, namespace, pod("alone", own_cluster.images["busybox"], LISTEN, nodeName=lost))
    running(own_cluster, namespace, "alone")
    where = (address(own_cluster, namespace, "alone"), 8000)
    own_cluster.orphan_node(lost)
    try:
        until(lambda: not is_ready(own_cluster, lost), f"{lost} to be missed")
        assert greeting(where) == b"hello\n"
    finally:
        own_cluster.restore_node(lost)
    assert greeting(where) == b"hello\n"
    running(own_cluster, namespace, "alone")
    status = get(own_cluster, namespace, "pod", "alone")["status"]["containerStatuses"][0]
    assert status["restartCount"] == 0


def is_ready(cluster, name: str) -> bool:
    seen = get(cluster, "default", "node", name)["status"]["conditions"]
    return any(each["type"] == "Ready" and each["status"] == "True" for each in seen)


def reaches(cluster, namespace: str, name: str, target: str, port: int = 8000) -> bool:
    """Whether the pod gets an answer from the address. A new pod may not listen yet, so this retries."""
    script = f"for i in 1 2 3; do nc -w 1 {target} {port} </dev/null && exit 0; done; echo closed"
    said = cluster.kubectl("-n", namespace, "exec", name, "--", "sh", "-c", script)
    assert "hello" in said or "closed" in said, said
    return "hello" in said


def greeting(where: tuple[str, int], limit: float = 60) -> bytes:
    """The pod's greeting to a client on this machine. A new pod may not listen yet, so this retries."""
    deadline = time.monotonic() + limit
    while True:
        try:
            with socket.create_connection(where, timeout=limit) as connection:
                if said := connection.recv(100):
                    return said
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)
