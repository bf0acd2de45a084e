"""Observations of tasks for the control loop, from contact and from the state of the cluster. Objects through
a real API are in test_engine_objects; these are rare states."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker.engine.base import Observation, Presence
from stoker.engine.kubernetes import names
from stoker.engine.kubernetes.config import ClusterConfig
from stoker.engine.kubernetes.courier_client.connections import Contact
from stoker.engine.kubernetes.status.observe import ClusterObservation, observe

KEY = ("digits-7f3k", 1, "worker-0")


def secret(made: dict[str, Any], asked: dict[str, int] | None = None) -> dict[str, Any]:
    annotations = {names.TASKS: json.dumps(asked or {"worker-0": 1}), names.SUBMITTED: json.dumps(made)}
    return {"metadata": {"name": "s", "labels": names.labels("h", "c", *KEY[:2]), "annotations": annotations}}


def pod(incarnation: int = 1, *, plain: bool = False, **status: Any) -> dict[str, Any]:
    labels = {**names.labels("h", "c", *KEY[:2]), names.TASK: KEY[2], names.INCARNATION: str(incarnation)}
    up = {"state": {"running": {}}, "restartCount": 0, "started": True}
    done = {"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}, "restartCount": 0}
    inits = [] if plain else [{"name": "init", "image": "i"}, {"name": "courier", "image": "i"}]
    shown = {
        "phase": "Running",
        "initContainerStatuses": [] if plain else [{"name": "init", **done}, {"name": "courier", **up}],
        "containerStatuses": [{"name": "main", **up}],
    }
    return {
        "metadata": {
            "name": names.pod_name(*KEY, incarnation),
            "uid": f"uid-{incarnation}",
            "labels": labels,
            "annotations": {names.PLAIN: "none"} if plain else {},
        },
        "spec": {"nodeName": "n1", "initContainers": inits, "containers": [{"name": "main", "image": "i"}]},
        "status": {**shown, **status},
    }


def look(
    *,
    secrets: Any = None,
    pods: Any = (),
    contact: Contact = Contact(ever=True),
    ready: bool = True,
    **more: Any,
) -> list[Observation]:
    node = {"metadata": {"name": "n1"}, "status": {"conditions": [{"type": "Ready", "status": str(ready)}]}}
    return observe(
        ClusterObservation(
            cluster="c",
            config=ClusterConfig(),
            secrets=[secret({"worker-0": [1, "uid-1"]})] if secrets is None else secrets,
            pods=pods,
            nodes=[node],
            events=lambda pod: [],
            contact=lambda key: contact,
            **more,
        )
    )


def test_a_task_that_answers_is_alive() -> None:
    (found,) = look(pods=[pod()])
    assert (found.run, found.attempt, found.task, found.incarnation) == (*KEY, 1)
    assert (found.presence, found.node, found.node_ready, found.waiting) == (Presence.ALIVE, "n1", True, "")
    assert found.handle == {"engine": "c", "run": "digits-7f3k", "attempt": 1}


CONTACTS = [
    (Contact(), Presence.ALIVE, "waits for its courier", ""),
    (Contact(silence=5.0, problem="x"), Presence.ALIVE, "waits for its courier", ""),
    (
        Contact(silence=60.0, problem="no route"),
        Presence.ALIVE,
        "its courier cannot be reached: no route",
        "engine-error",
    ),
    (Contact(ever=True, silence=5.0, problem="x"), Presence.ALIVE, "", ""),
    (Contact(ever=True, silence=60.0, problem="x"), Presence.SILENT, "has not answered for 60 s: x", ""),
    (Contact(known=True, silence=60.0, problem="x"), Presence.SILENT, "has not answered for 60 s: x", ""),
]


@pytest.mark.parametrize(("contact", "presence", "words", "hopeless"), CONTACTS)
def test_what_silence_means(contact: Contact, presence: Presence, words: str, hopeless: str) -> None:
    """A task that never answered is unreachable; one that did, or that an earlier server started, may be
    dead."""
    (found,) = look(pods=[pod()], contact=contact)
    assert (found.presence, found.hopeless) == (presence, hopeless)
    assert words in found.waiting and (words == "") == (found.waiting == "")
    assert found.node_ready is True


def test_a_task_on_a_node_that_is_not_ready_is_silent_also_with_contact() -> None:
    (found,) = look(pods=[pod()], ready=False)
    assert (found.presence, found.node_ready) == (Presence.SILENT, False)


def test_proof_of_death_counts_on_any_node() -> None:
    (found,) = look(pods=[pod(phase="Failed", reason="Evicted", message="disk")], ready=False)
    assert (found.presence, found.cause) == (Presence.GONE, "evicted")


def test_only_the_newest_incarnation_is_reported() -> None:
    state = {"name": "main", "restartCount": 1, "lastState": {"terminated": {"exitCode": 137}}, "state": {}}
    dead = pod(1, containerStatuses=[state])
    (found,) = look(secrets=[secret({"worker-0": [2, "uid-2"]}, {"worker-0": 2})], pods=[pod(2), dead])
    assert (found.incarnation, found.presence) == (2, Presence.ALIVE)
    (found,) = look(secrets=[secret({"worker-0": [2, "uid-2"]}, {"worker-0": 2})], pods=[dead])
    assert (found.incarnation, found.presence) == (2, Presence.GONE), "an older one is no sign of the newer"


def test_a_pod_that_is_gone_is_reported_with_its_last_state() -> None:
    last = pod()
    last["status"]["conditions"] = [
        {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    ]
    (found,) = look(deleted_pods={"uid-1": last})
    assert (found.presence, found.cause, found.node) == (Presence.GONE, "preempted", "n1")
    (found,) = look(ended=frozenset({KEY[:2]}))
    assert (found.proof, found.cause) == ("pod digits-7f3k-1-worker-0 was ended", "")


def test_objects_with_other_labels_are_skipped() -> None:
    strange = pod()
    strange["metadata"]["labels"][names.RUN] = "../../etc"
    assert look(secrets=[], pods=[strange]) == []
    broken = secret({})
    broken["metadata"]["annotations"] = {names.TASKS: "{not json", names.SUBMITTED: "[1]"}
    assert look(secrets=[broken]) == []


@pytest.mark.parametrize("code", [0, 3, 137])
def test_a_container_without_a_launcher_that_ended_by_itself_is_alive(code: int) -> None:
    state = {
        "name": "main",
        "restartCount": 0,
        "state": {"terminated": {"exitCode": code, "reason": "Error"}},
    }
    (found,) = look(pods=[pod(plain=True, phase="Failed", containerStatuses=[state])])
    assert (found.presence, found.cause, found.waiting) == (Presence.ALIVE, "", "")


def test_a_container_without_a_launcher_that_was_evicted_is_gone() -> None:
    state = {"name": "main", "restartCount": 0, "state": {"terminated": {"exitCode": 137, "reason": "Error"}}}
    shown = pod(plain=True, phase="Failed", reason="Evicted", message="memory", containerStatuses=[state])
    (found,) = look(pods=[shown])
    assert (found.presence, found.cause) == (Presence.GONE, "evicted")


def test_a_running_container_without_a_launcher_waits_for_nothing() -> None:
    (found,) = look(pods=[pod(plain=True)], contact=Contact())
    assert (found.presence, found.waiting) == (Presence.ALIVE, "")
