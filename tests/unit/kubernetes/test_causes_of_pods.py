"""The state of a pod in plain words. The pods in pods/ were recorded on a real cluster
(tests/cluster/test_causes.py with STOKER_RECORD_PODS set); the others could not be produced on one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.kubernetes.status import image_errors, pod_causes, unschedulable
from stoker.engine.kubernetes.status.pod_causes import PodFinding
from stoker.spec.states import Cause

PODS = Path(__file__).parent / "pods"


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PODS / f"{name}.json").read_text())
    return found


def look(name: str) -> PodFinding:
    shown = recorded(name)
    return pod_causes.look(shown["pod"], shown["events"], shown["nodes"])


WAITING = {
    "image-missing": ("image", None, "nobody/nothing:1 cannot be pulled: the image does not exist"),
    "registry-away": (
        "image",
        None,
        "127.0.0.1:9/a/b:1 cannot be pulled: its registry does not answer the node",
    ),
    "unschedulable-cpu": (
        "engine-error",
        None,
        "no node can take it now: 2 of 2 nodes have too little CPU free."
        " It requests 500 CPU, and the largest node has 2 CPU",
    ),
    "unschedulable-gpu": ("engine-error", None, "It requests 64 nvidia.com/gpu, and the largest node has 4"),
    "unschedulable-memory": (
        "engine-error",
        None,
        "It requests 4 TiB of memory, and the largest node has 23.5 GiB",
    ),
    "unschedulable-pool": ("engine-error", None, "2 of 2 nodes do not belong to the pool"),
    "claim-missing": ("engine-error", None, 'the volume claim "nothing" not found'),
    "no-python": ("image", 0.0, "has no Python that the launcher can use"),
    "wrong-python": ("image", 0.0, "has no /opt/none/python3"),
    "config-error": ("engine-error", None, 'container main cannot be started: secret "no" not found'),
}
ENDED = {
    "no-python-main": ("image", "its launcher cannot run"),
    "evicted-disk": ("disk", "it used more disk than it may (20 MiB)"),
    "drained": ("evicted", "its node is being drained"),
    "preempted": ("preempted", "a pod of higher priority needed its place"),
    "tainted": ("evicted", "its node was tainted"),
    "node-removed": ("lost", "its node was removed from the cluster"),
    "plain-oom": ("oom", "ran out of memory (limit 32 MiB)"),
    "plain-deadline": ("timeout", "it ran longer than it may"),
}


def test_every_recorded_pod_is_explained_here() -> None:
    assert {path.stem for path in PODS.glob("*.json")} == set(WAITING) | set(ENDED)


@pytest.mark.parametrize("name", WAITING)
def test_why_it_waits(name: str) -> None:
    hopeless, patience, words = WAITING[name]
    found = look(name)
    assert words in found.waiting
    assert (found.hopeless, found.patience, found.proof) == (hopeless, patience, "")
    assert found.evidence["pod"] == "digits-7f3k-1-worker-0"
    assert found.waiting.isprintable() and len(found.waiting) < 1000
    Cause(found.hopeless)


@pytest.mark.parametrize("name", ENDED)
def test_how_it_ended(name: str) -> None:
    cause, words = ENDED[name]
    found = look(name)
    assert words in found.proof
    assert (found.cause, found.waiting) == (cause, "")
    Cause(found.cause)


@pytest.mark.parametrize("name", ENDED)
def test_what_was_last_seen_explains_a_pod_that_is_gone(name: str) -> None:
    shown = recorded(name)
    found = pod_causes.vanished("digits-7f3k-1-worker-0", shown["pod"], shown["events"])
    assert (found.cause, ENDED[name][1] in found.proof) == (ENDED[name][0], True)


# -- pods that could not be produced ---------------------------------------------------------------------------


def running() -> dict[str, Any]:
    """A pod in which all containers run."""
    up = {"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "restartCount": 0, "started": True}
    done = {"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}, "restartCount": 0}
    return {
        "metadata": {"name": "p", "uid": "u"},
        "spec": {
            "nodeName": "node-1",
            "initContainers": [{"name": "init", "image": "i"}, {"name": "courier", "image": "i"}],
            "containers": [{"name": "main", "image": "torch:2", "resources": {"limits": {"memory": "8Gi"}}}],
        },
        "status": {
            "phase": "Running",
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            "initContainerStatuses": [{"name": "init", **done}, {"name": "courier", **copy.deepcopy(up)}],
            "containerStatuses": [{"name": "main", **up}],
        },
    }


def test_a_running_pod_has_no_message() -> None:
    assert pod_causes.look(running()) == PodFinding()
    assert pod_causes.courier_runs(running())


def main_ended(**state: Any) -> dict[str, Any]:
    """Its launcher has died, and the kubelet has started another one."""
    pod = running()
    pod["status"]["containerStatuses"][0] |= {"restartCount": 1, "lastState": {"terminated": state}}
    return pod


DIED = [
    ({"exitCode": 137, "reason": "OOMKilled"}, "oom", "ran out of memory (limit 8 GiB)"),
    ({"exitCode": 137, "reason": "Error"}, "lost", "ended with signal 9"),
    ({"exitCode": 1, "reason": "Error", "message": "Traceback"}, "lost", "ended with exit code 1: Traceback"),
    (
        {"exitCode": 127, "reason": "Error", "message": "no Python 3.9 or newer in this image"},
        "image",
        "no Python",
    ),
    (
        {
            "exitCode": 128,
            "reason": "StartError",
            "message": 'failed to create containerd task: exec: "/bin/sh": stat /bin/sh: no such file or directory',
        },
        "image",
        "has no shell; name its Python with `python:`",
    ),
    (
        {
            "exitCode": 128,
            "reason": "StartError",
            "message": "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.4, please update your driver",
        },
        "image",
        "needs cuda>=12.4, and the NVIDIA driver of the node is too old",
    ),
    (
        {"exitCode": 1, "reason": "Error", "message": "exec /bin/sh: exec format error"},
        "image",
        "another machine architecture",
    ),
]


@pytest.mark.parametrize(("state", "cause", "words"), DIED)
def test_a_launcher_that_died_in_a_pod_that_lives(state: dict[str, Any], cause: str, words: str) -> None:
    found = pod_causes.look(main_ended(**state))
    assert words in found.proof and found.cause == cause
    assert found.evidence["containers"]["main"]["exitCode"] == state["exitCode"]


def test_a_released_launcher_has_no_cause() -> None:
    pod = running()
    pod["status"]["phase"] = "Succeeded"
    pod["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 0, "reason": "Completed"}}
    found = pod_causes.look(pod)
    assert found.proof and found.cause == ""


FAILED = [
    (
        "Evicted",
        "The node was low on resource: memory. Threshold quantity: 100Mi",
        "evicted",
        "short of memory",
    ),
    (
        "Evicted",
        "The node was low on resource: ephemeral-storage. Container main was using 5Gi",
        "evicted",
        "short of disk",
    ),
    ("Evicted", 'Container main exceeded its local ephemeral storage limit "10Gi". ', "disk", "(10 GiB)"),
    ("Evicted", 'Usage of EmptyDir volume "task" exceeds the limit "1Gi". ', "disk", "(1 GiB)"),
    ("Evicted", "Pod was evicted by an operator", "evicted", "Pod was evicted by an operator"),
    ("NodeLost", "Node node-1 which was running pod p is unresponsive", "lost", "its node was lost"),
    ("NodeShutdown", "Pod was rejected as the node is shutting down.", "evicted", "shutting down"),
    ("Terminated", "Pod was terminated in response to imminent node shutdown.", "evicted", "shutting down"),
    ("OutOfcpu", "Node didn't have enough resource: cpu", "engine-error", "its node refused"),
    (
        "UnexpectedAdmissionError",
        "Allocate failed due to no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu",
        "gpu-fault",
        "no healthy devices",
    ),
    ("Strange", "", "lost", "Strange"),
]


@pytest.mark.parametrize(("reason", "message", "cause", "words"), FAILED)
def test_a_pod_that_the_cluster_ended(reason: str, message: str, cause: str, words: str) -> None:
    pod = running()
    pod["status"] |= {"phase": "Failed", "reason": reason, "message": message, "containerStatuses": []}
    found = pod_causes.look(pod)
    assert words in found.proof and found.cause == cause
    assert found.evidence["reason"] == reason


DISRUPTIONS = [
    ("PreemptionByScheduler", "preempted"),
    ("DeletionByTaintManager", "evicted"),
    ("EvictionByEvictionAPI", "evicted"),
    ("DeletionByPodGC", "lost"),
    ("TerminationByKubelet", "evicted"),
    ("SomethingNew", "evicted"),
]


@pytest.mark.parametrize(("reason", "cause"), DISRUPTIONS)
def test_a_pod_that_was_disrupted_and_is_gone(reason: str, cause: str) -> None:
    pod = running()
    pod["status"]["conditions"].append({"type": "DisruptionTarget", "status": "True", "reason": reason})
    assert pod_causes.look(pod) == PodFinding(), "until it is dead it lives"
    assert pod_causes.vanished("p", pod).cause == cause


def test_a_pod_that_went_unseen_is_explained_by_events() -> None:
    def event(reason: str, message: str = "") -> dict[str, Any]:
        return {"reason": reason, "message": message}

    for reason, cause in (
        ("Preempted", "preempted"),
        ("TaintManagerEviction", "evicted"),
        ("Evicted", "evicted"),
    ):
        found = pod_causes.vanished("p", None, [event("Killing"), event(reason), event("Killing")])
        assert found.cause == cause
    cancelled = event("TaintManagerEviction", "Cancelling deletion of Pod a/p")
    assert pod_causes.vanished("p", None, [cancelled]) == PodFinding(
        "pod p is gone: it or its node was deleted",
        "lost",
        evidence={"events": ["TaintManagerEviction: Cancelling deletion of Pod a/p"]},
    )
    assert pod_causes.vanished("p", None, by_engine=True) == PodFinding("pod p was ended")


def waiting(name: str, **state: Any) -> dict[str, Any]:
    pod = running()
    pod["status"]["phase"] = "Pending"
    kind = "containerStatuses" if name == "main" else "initContainerStatuses"
    for status in pod["status"][kind]:
        if status["name"] == name:
            status["state"] = {"waiting": state}
    return pod


PULLS = [
    ('failed to resolve reference "x": unexpected status: 401 Unauthorized', "requires a login", None),
    ("pull access denied, repository does not exist or may require authorization", "requires a login", None),
    ("no match for platform in manifest: not found", "has no version for the nodes' architecture", None),
    ("dial tcp: lookup registry.example.com: no such host", "does not answer the node", None),
    ('Get "https://x": net/http: TLS handshake timeout', "does not answer the node", None),
    ("manifest unknown", "the image does not exist", None),
    ("an unknown message", "cannot be pulled: an unknown message", None),
]


@pytest.mark.parametrize(("message", "words", "_"), PULLS)
def test_errors_of_registries(message: str, words: str, _: None) -> None:
    found = pod_causes.look(waiting("main", reason="ErrImagePull", message=message))
    assert words in found.waiting and found.hopeless == "image" and "torch:2" in found.waiting


def test_a_back_off_keeps_the_error_of_the_registry() -> None:
    """The back-off message of the kubelet has no reason; the events have it."""
    pod = waiting("main", reason="ImagePullBackOff", message='Back-off pulling image "torch:2"')
    events = [{"reason": "Failed", "message": 'Failed to pull image "torch:2": manifest unknown'}]
    assert "the image does not exist (manifest unknown)" in pod_causes.look(pod, events).waiting
    assert "cannot be pulled" in pod_causes.look(pod).waiting


def test_an_invalid_image_name_is_hopeless_at_once() -> None:
    found = pod_causes.look(waiting("main", reason="InvalidImageName", message="couldn't parse image name"))
    assert (found.hopeless, found.patience) == ("image", 0.0) and "not a reference" in found.waiting


def test_containers_that_cannot_be_started() -> None:
    error = "container has runAsNonRoot and image has non-numeric user (app), cannot verify user is non-root"
    found = pod_causes.look(waiting("main", reason="CreateContainerConfigError", message=error))
    assert found.hopeless == "image" and "does not allow" in found.waiting
    found = pod_causes.look(waiting("main", reason="RunContainerError", message="something in the runtime"))
    assert found.hopeless == "engine-error" and "something in the runtime" in found.waiting


def test_containers_of_stoker_that_do_not_stay_up() -> None:
    for name, words in (
        ("init", "task directory cannot be created"),
        ("courier", "courier does not stay up"),
    ):
        pod = waiting(name, reason="CrashLoopBackOff", message="back-off")
        for status in pod["status"]["initContainerStatuses"]:
            if status["name"] == name:
                status["lastState"] = {
                    "terminated": {"exitCode": 74, "reason": "Error", "message": "No space left"}
                }
        found = pod_causes.look(pod)
        assert (
            words in found.waiting and "No space left" in found.waiting and found.hopeless == "engine-error"
        )


def test_reasons_from_events() -> None:
    pod = running()
    pod["status"] |= {"phase": "Pending", "initContainerStatuses": [], "containerStatuses": []}
    for reason, words in (
        ("FailedMount", "a volume cannot be mounted: the words"),
        ("FailedAttachVolume", "a volume cannot be mounted: the words"),
        ("FailedCreatePodSandBox", "sandbox: the words"),
    ):
        found = pod_causes.look(pod, [{"reason": reason, "message": "the words"}])
        assert words in found.waiting and found.hopeless == "engine-error"
    found = pod_causes.look(pod, [{"reason": "Pulling", "message": 'Pulling image "torch:2"'}])
    assert (found.waiting, found.hopeless) == ("pulls the image torch:2", "")
    assert pod_causes.look(pod, []).waiting == "is being started on node-1"


def test_a_scheduling_gate_and_a_pending_scheduler() -> None:
    pod = running()
    del pod["spec"]["nodeName"]
    pod["status"] = {"phase": "Pending"}
    assert pod_causes.look(pod).waiting == "waits for the scheduler"
    pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]
    assert pod_causes.look(pod).waiting == "is held back by a scheduling gate"


REFUSED = [
    (
        'pods "a" is forbidden: status unknown for quota: team, resources: pods',
        403,
        "the namespace's quota team is new, and not counted yet",
        True,
    ),
    (
        'pods "a" is forbidden: exceeded quota: team, requested: nvidia.com/gpu=2, used: nvidia.com/gpu=4, limited: nvidia.com/gpu=4',
        403,
        "the namespace's quota team is used up: requested: nvidia.com/gpu=2, used: nvidia.com/gpu=4",
        True,
    ),
    (
        'pods "a" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false',
        403,
        "pod security level does not admit it",
        False,
    ),
    (
        'admission webhook "policy.example.com" denied the request: images must come from our registry',
        403,
        "webhook policy.example.com refused it: images must come from our registry",
        False,
    ),
    (
        'Pod "a" is invalid: spec.containers[0].image: Required value',
        422,
        "the cluster refused the pod",
        False,
    ),
    ('pods "a" is forbidden: no PriorityClass with name high was found', 403, "refused the pod", False),
]


@pytest.mark.parametrize(("message", "status", "words", "passes"), REFUSED)
def test_pods_that_are_refused(message: str, status: int, words: str, passes: bool) -> None:
    text, hint = pod_causes.refused(message, status)
    assert words in text and hint
    assert pod_causes.over_quota(message) is passes


SCHEDULER = [
    (
        "0/5 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/unreachable: }, 1 node(s) were"
        " unschedulable, 3 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/5 nodes are"
        " available: 2 Preemption is not helpful for scheduling, 3 No preemption victims found for incoming pod.",
        "no node can take it now: 1 of 5 nodes is unreachable; 1 of 5 nodes is unschedulable;"
        " 3 of 5 nodes have too little nvidia.com/gpu free",
    ),
    (
        "0/1 nodes are available: 1 Too many pods. preemption: 0/1 nodes are available",
        "no node can take it now: the only node has as many pods as allowed",
    ),
    (
        "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had untolerated taint(s) {dedicated: team-a}.",
        "no node can take it now: 1 of 3 nodes has too little CPU free; 2 of 3 nodes have the taint dedicated: team-a",
    ),
    (
        "0/2 nodes are available: 2 node(s) had volume node affinity conflict.",
        "no node can take it now: 2 of 2 nodes: node(s) had volume node affinity conflict",
    ),
    ("no nodes available to schedule pods", "no node takes it: no nodes available to schedule pods"),
    ("", "no node takes it yet"),
]


@pytest.mark.parametrize(("message", "words"), SCHEDULER)
def test_the_message_of_the_scheduler_is_parsed(message: str, words: str) -> None:
    assert unschedulable.explain(message, unschedulable.PodRequest()) == words


def test_what_a_pod_asks_for_is_counted_as_kubernetes_does() -> None:
    def sized(cpu: str, memory: str, **more: Any) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu, "memory": memory}}, **more}

    pod = {
        "spec": {
            "initContainers": [sized("4", "1Gi"), sized("100m", "64Mi", restartPolicy="Always")],
            "containers": [
                {
                    "resources": {
                        "requests": {"cpu": "2", "memory": "8Gi"},
                        "limits": {"memory": "8Gi", "nvidia.com/gpu": "2"},
                    }
                }
            ],
            "overhead": {"cpu": "50m"},
        }
    }
    found = unschedulable.requests_of(pod)
    assert (found.cpu, found.memory) == (4.05, (8 << 30) + (64 << 20))
    assert found.devices == (("nvidia.com/gpu", 2),)


def test_nodes_that_have_it_but_not_together() -> None:
    nodes = [{"status": {"allocatable": {"cpu": "8", "memory": "4Gi"}}}, {"status": {"allocatable": {"cpu": "1", "memory": "64Gi"}}}]  # fmt: skip
    text = unschedulable.explain(
        "0/2 nodes are available: 2 Insufficient cpu.", unschedulable.PodRequest(4, 32 << 30), nodes
    )
    assert text.endswith("It requests 4 CPU, 32 GiB of memory on one node, and no node has all of it")


def test_messages_are_cut_and_on_one_line() -> None:
    pod = main_ended(exitCode=1, reason="Error", message="a\nb\n" + "x" * 5000)
    found = pod_causes.look(pod)
    assert "\n" not in found.proof and len(found.proof) < 800


def test_any_image_message_is_parsed() -> None:
    for message in ("", "x" * 10_000, "\n", "Back-off", 'exec: "": ', "\u202e"):
        assert image_errors.cannot_pull("i", "ErrImagePull", message).startswith(
            "the image i cannot be pulled"
        )
        image_errors.cannot_run("i", None, "Error", message)


@pytest.mark.parametrize(("reason", "no_room"), [("Insufficient cpu", True), ("node(s) didn't match", False)])
def test_a_pod_that_waits_for_room_is_marked(reason: str, no_room: bool) -> None:
    """Only runs that wait for places of each other can deadlock; a pod that waits for something else does not
    count."""
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": f"0/2 nodes are available: 2 {reason}.",
    }
    pod = {
        "metadata": {"name": "digits-7f3k-1-worker-0"},
        "status": {"phase": "Pending", "conditions": [condition]},
    }
    found = pod_causes.look(pod)
    assert found.waiting and found.no_room is no_room
