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
from stoker.engine.kubernetes.lifecycle.create import marks
from stoker.engine.kubernetes.lifecycle.launcherless import by_itself, is_plain
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
    tombs: Mapping[str, Object] = field(default_factory=dict)
    """Deleted pods by UID, in their last state."""
    ended: frozenset[tuple[str, int]] = frozenset()
    """Attempts that the engine was told to end."""
    refusals: Mapping[Key, tuple[str, str]] = field(default_factory=dict)
    """Pods that the cluster refuses for now."""
    bereft: Sequence[Key] = ()
    """Tasks with a mirror or a pod whose Secret is gone."""

    @cached_property
    def by_name(self) -> dict[str, Object]:
        return {str(node["metadata"]["name"]): node for node in self.nodes or ()}


def observe(sight: ClusterObservation) -> list[Observation]:
    """One observation per task, of its newest incarnation."""
    newest: dict[Key, Object] = {}
    for pod in sight.pods:
        key = names.key_of(pod)
        if key is not None and names.incarnation_of(pod) >= names.incarnation_of(newest.get(key, pod)):
            newest[key] = pod
    found = {}
    for secret in sight.secrets:
        for one in _attempt(sight, secret, newest):
            found[one.run, one.attempt, one.task] = one
    for key, pod in newest.items():
        if key not in found:  # its Secret is gone, so the garbage collector will delete it
            one = _pod(sight, key, pod)
            found[key] = replace(one, proof=_bereft(key)) if one.presence is Presence.GONE else one
    for key in sight.bereft:
        if key not in found:
            found[key] = _gone(sight, key, 1, PodFinding(_bereft(key), Cause.LOST))
    return list(found.values())


def _attempt(sight: ClusterObservation, secret: Object, newest: Mapping[Key, Object]) -> list[Observation]:
    attempt = names.attempt_of(secret)
    if attempt is None:
        return []
    asked, made = marks(secret)
    found = []
    for task, incarnation in asked.items():
        key = (*attempt, task)
        pod = newest.get(key)
        if pod is not None and names.incarnation_of(pod) >= made.get(task, (0, ""))[0]:
            found.append(_pod(sight, key, pod))
        elif key in sight.refusals:
            found.append(_refused(sight, key, incarnation))
        else:
            found.append(_absent(sight, key, incarnation, made.get(task)))
    return found


def _pod(sight: ClusterObservation, key: Key, pod: Object) -> Observation:
    node = _node(sight, pod)
    ready = capacity.ready(node) if node is not None else None
    finding = pod_causes.look(pod, sight.events(pod), sight.nodes)
    presence, waiting, hopeless = Presence.ALIVE, finding.waiting, finding.hopeless
    proof = finding.proof
    if proof and is_plain(pod) and by_itself(pod):
        finding, proof = PodFinding(), ""
    elif proof:
        presence = Presence.GONE
    elif ready is False:
        presence, proof = Presence.SILENT, f"node {_node_name(pod)} is not ready"
    elif not waiting and pod_causes.courier_runs(pod):
        presence, waiting, hopeless = _by_contact(sight, key)
        proof = waiting if presence is Presence.SILENT else ""
    return Observation(
        *key,
        incarnation=names.incarnation_of(pod),
        presence=presence,
        proof=proof,
        node=_node_name(pod),
        handle=_handle(sight, key),
        address=str((pod.get("status") or {}).get("podIP") or ""),
        node_ready=ready,
        cause=finding.cause,
        evidence=finding.evidence,
        waiting="" if presence is Presence.GONE else waiting,
        hopeless="" if presence is Presence.GONE else hopeless,
        patience=sight.config.start_deadline if finding.patience is None else finding.patience,
        no_room=finding.no_room,
    )


def _by_contact(sight: ClusterObservation, key: Key) -> tuple[Presence, str, str]:
    """The cluster reports that its containers run; the courier shows whether it responds."""
    contact = sight.contact(key)
    if contact.silence < sight.config.silent_after:
        return Presence.ALIVE, "" if contact.ever else "waits for its courier", ""
    trouble = f": {contact.trouble}" if contact.trouble else ""
    if contact.ever or contact.known:
        return Presence.SILENT, f"its courier has not answered for {contact.silence:.0f} s{trouble}", ""
    return Presence.ALIVE, f"its courier cannot be reached{trouble}", Cause.ENGINE_ERROR


def _refused(sight: ClusterObservation, key: Key, incarnation: int) -> Observation:
    text, hint = sight.refusals[key]
    return Observation(
        *key,
        incarnation=incarnation,
        presence=Presence.ALIVE,
        node="",
        handle=_handle(sight, key),
        waiting=text,
        hopeless=Cause.ENGINE_ERROR,
        evidence={"message": text, "hint": hint},
        patience=sight.config.start_deadline,
        no_room=hint == pod_causes.QUOTA_HINT,
    )


def _absent(
    sight: ClusterObservation, key: Key, incarnation: int, made: tuple[int, str] | None
) -> Observation:
    """The task was requested, but it has no pod."""
    name = names.pod_name(*key, incarnation)
    if made is None or made[0] < incarnation:
        return _gone(sight, key, incarnation, PodFinding(f"pod {name} was never created"))
    last = sight.tombs.get(made[1])
    events = sight.events({"metadata": {"uid": made[1]}})
    finding = pod_causes.vanished(name, last, events, ours=key[:2] in sight.ended)
    return _gone(sight, key, incarnation, finding, last)


def _gone(
    sight: ClusterObservation, key: Key, incarnation: int, finding: PodFinding, last: Object | None = None
) -> Observation:
    return Observation(
        *key,
        incarnation=incarnation,
        presence=Presence.GONE,
        proof=finding.proof,
        node=_node_name(last) if last is not None else "",
        handle=_handle(sight, key),
        cause=finding.cause,
        evidence=finding.evidence,
    )


def _bereft(key: Key) -> str:
    return f"Secret {names.secret_name(*key[:2])} was deleted from outside Stoker, and its pods with it"


def _node(sight: ClusterObservation, pod: Object) -> Object | None:
    return sight.by_name.get(_node_name(pod))


def _node_name(pod: Object) -> str:
    return str((pod.get("spec") or {}).get("nodeName") or "")


def _handle(sight: ClusterObservation, key: Key) -> dict[str, Any]:
    return {"engine": sight.cluster, "run": key[0], "attempt": key[1]}
