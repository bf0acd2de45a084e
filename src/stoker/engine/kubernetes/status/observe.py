"""Translates the state of a cluster's objects into observations of tasks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from stoker.engine.base import Observation, Presence
from stoker.engine.change_feed import Key
from stoker.engine.kubernetes import capacity, names
from stoker.engine.kubernetes.config import ClusterConfig
from stoker.engine.kubernetes.courier_client.connections import Contact
from stoker.engine.kubernetes.lifecycle.create import incarnations
from stoker.engine.kubernetes.lifecycle.launcherless import ended_by_itself, is_launcherless
from stoker.engine.kubernetes.status import pod_causes
from stoker.engine.kubernetes.status.pod_causes import PodFinding
from stoker.spec.states import Cause

Object = Mapping[str, Any]


@dataclass(frozen=True)
class ClusterObservation:
    """A snapshot of a cluster, and what the engine remembers besides."""

    cluster: str
    config: ClusterConfig
    secrets: Sequence[Object]
    pods: Sequence[Object]
    nodes: Sequence[Object] | None
    """None: nodes may not be listed."""
    events: Callable[[Object], Sequence[Object]]
    contact: Callable[[Key], Contact]
    deleted_pods: Mapping[str, Object] = field(default_factory=dict)
    """Deleted pods by UID, in their last state."""
    ended: frozenset[tuple[str, int]] = frozenset()
    """Attempts that the engine was told to end."""
    refusals: Mapping[Key, tuple[str, str]] = field(default_factory=dict)
    """Pods that the cluster refuses for now."""
    without_secret: Sequence[Key] = ()
    """Tasks with a mirror or a pod whose Secret is gone."""

    @cached_property
    def by_name(self) -> dict[str, Object]:
        return {str(node["metadata"]["name"]): node for node in self.nodes or ()}


def observe(snapshot: ClusterObservation) -> list[Observation]:
    """One observation per task, of its newest incarnation."""
    newest: dict[Key, Object] = {}
    for pod in snapshot.pods:
        key = names.key_of(pod)
        if key is not None and names.incarnation_of(pod) >= names.incarnation_of(newest.get(key, pod)):
            newest[key] = pod
    found = {}
    for secret in snapshot.secrets:
        for one in _attempt(snapshot, secret, newest):
            found[one.run, one.attempt, one.task] = one
    for key, pod in newest.items():
        if key not in found:  # its Secret is gone, so the garbage collector will delete it
            one = _pod(snapshot, key, pod)
            found[key] = replace(one, proof=_secret_deleted(key)) if one.presence is Presence.GONE else one
    for key in snapshot.without_secret:
        if key not in found:
            found[key] = _gone(snapshot, key, 1, PodFinding(_secret_deleted(key), Cause.LOST))
    return list(found.values())


def _attempt(snapshot: ClusterObservation, secret: Object, newest: Mapping[Key, Object]) -> list[Observation]:
    attempt = names.attempt_of(secret)
    if attempt is None:
        return []
    requested, created = incarnations(secret)
    found = []
    for task, incarnation in requested.items():
        key = (*attempt, task)
        pod = newest.get(key)
        if pod is not None and names.incarnation_of(pod) >= created.get(task, (0, ""))[0]:
            found.append(_pod(snapshot, key, pod))
        elif key in snapshot.refusals:
            found.append(_refused(snapshot, key, incarnation))
        else:
            found.append(_absent(snapshot, key, incarnation, created.get(task)))
    return found


def _pod(snapshot: ClusterObservation, key: Key, pod: Object) -> Observation:
    node = _node(snapshot, pod)
    ready = capacity.ready(node) if node is not None else None
    finding = pod_causes.look(pod, snapshot.events(pod), snapshot.nodes)
    presence, waiting, hopeless = Presence.ALIVE, finding.waiting, finding.hopeless
    proof = finding.proof
    if proof and is_launcherless(pod) and ended_by_itself(pod):
        finding, proof = PodFinding(), ""
    elif proof:
        presence = Presence.GONE
    elif ready is False:
        presence, proof = Presence.SILENT, f"node {_node_name(pod)} is not ready"
    elif not waiting and pod_causes.courier_runs(pod):
        presence, waiting, hopeless = _by_contact(snapshot, key)
        proof = waiting if presence is Presence.SILENT else ""
    return Observation(
        *key,
        incarnation=names.incarnation_of(pod),
        presence=presence,
        proof=proof,
        node=_node_name(pod),
        handle=_handle(snapshot, key),
        address=str((pod.get("status") or {}).get("podIP") or ""),
        node_ready=ready,
        cause=finding.cause,
        evidence=finding.evidence,
        waiting="" if presence is Presence.GONE else waiting,
        hopeless="" if presence is Presence.GONE else hopeless,
        patience=snapshot.config.start_deadline if finding.patience is None else finding.patience,
        no_room=finding.no_room,
    )


def _by_contact(snapshot: ClusterObservation, key: Key) -> tuple[Presence, str, str]:
    """The cluster reports that its containers run; the courier shows whether it responds."""
    contact = snapshot.contact(key)
    if contact.silence < snapshot.config.silent_after:
        return Presence.ALIVE, "" if contact.ever else "waits for its courier", ""
    problem = f": {contact.problem}" if contact.problem else ""
    if contact.ever or contact.known:
        return Presence.SILENT, f"its courier has not answered for {contact.silence:.0f} s{problem}", ""
    return Presence.ALIVE, f"its courier cannot be reached{problem}", Cause.ENGINE_ERROR


def _refused(snapshot: ClusterObservation, key: Key, incarnation: int) -> Observation:
    text, hint = snapshot.refusals[key]
    return Observation(
        *key,
        incarnation=incarnation,
        presence=Presence.ALIVE,
        node="",
        handle=_handle(snapshot, key),
        waiting=text,
        hopeless=Cause.ENGINE_ERROR,
        evidence={"message": text, "hint": hint},
        patience=snapshot.config.start_deadline,
        no_room=hint == pod_causes.QUOTA_HINT,
    )


def _absent(
    snapshot: ClusterObservation, key: Key, incarnation: int, created: tuple[int, str] | None
) -> Observation:
    """The task was requested, but it has no pod."""
    name = names.pod_name(*key, incarnation)
    if created is None or created[0] < incarnation:
        return _gone(snapshot, key, incarnation, PodFinding(f"pod {name} was never created"))
    last = snapshot.deleted_pods.get(created[1])
    events = snapshot.events({"metadata": {"uid": created[1]}})
    finding = pod_causes.vanished(name, last, events, by_engine=key[:2] in snapshot.ended)
    return _gone(snapshot, key, incarnation, finding, last)


def _gone(
    snapshot: ClusterObservation, key: Key, incarnation: int, finding: PodFinding, last: Object | None = None
) -> Observation:
    return Observation(
        *key,
        incarnation=incarnation,
        presence=Presence.GONE,
        proof=finding.proof,
        node=_node_name(last) if last is not None else "",
        handle=_handle(snapshot, key),
        cause=finding.cause,
        evidence=finding.evidence,
    )


def _secret_deleted(key: Key) -> str:
    return f"Secret {names.secret_name(*key[:2])} was deleted from outside Stoker, and its pods with it"


def _node(snapshot: ClusterObservation, pod: Object) -> Object | None:
    return snapshot.by_name.get(_node_name(pod))


def _node_name(pod: Object) -> str:
    return str((pod.get("spec") or {}).get("nodeName") or "")


def _handle(snapshot: ClusterObservation, key: Key) -> dict[str, Any]:
    return {"engine": snapshot.cluster, "run": key[0], "attempt": key[1]}
