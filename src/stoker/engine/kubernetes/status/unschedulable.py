"""Explains why no node takes a pod, from the scheduler's message and the nodes' sizes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.engine.kubernetes.quantity import number, show_cores
from stoker.task.units import readable_size

Object = Mapping[str, Any]


@dataclass(frozen=True)
class PodRequest:
    """The resources that a pod requests of one node, all its containers together."""

    cpu: float = 0.0
    memory: int = 0
    disk: int = 0
    devices: tuple[tuple[str, int], ...] = ()

    def amounts(self) -> dict[str, float]:
        found: dict[str, float] = {"cpu": self.cpu, "memory": self.memory, "ephemeral-storage": self.disk}
        return {name: amount for name, amount in (found | dict(self.devices)).items() if amount}


def requests_of(pod: Object) -> PodRequest:
    """By Kubernetes' rule: containers that run together add up; those that run before count if they need more."""
    spec = pod.get("spec") or {}
    total: dict[str, Any] = {}
    sidecars: dict[str, Any] = {}
    most: dict[str, Any] = {}
    for one in spec.get("initContainers") or ():
        wants = _requests(one)
        if one.get("restartPolicy") == "Always":
            sidecars = _added(sidecars, wants)
            most = _larger(most, sidecars)
        else:
            most = _larger(most, _added(sidecars, wants))
    total = sidecars
    for one in spec.get("containers") or ():
        total = _added(total, _requests(one))
    whole = _larger(_larger(total, most), _pod_level(spec))
    whole = _added(whole, {key: number(value) for key, value in (spec.get("overhead") or {}).items()})
    known = ("cpu", "memory", "ephemeral-storage")
    return PodRequest(
        cpu=float(whole.get("cpu", 0)),
        memory=int(whole.get("memory", 0)),
        disk=int(whole.get("ephemeral-storage", 0)),
        devices=tuple(sorted((key, int(value)) for key, value in whole.items() if key not in known)),
    )


def explain(message: str, wanted: PodRequest, nodes: Sequence[Object] | None = None) -> str:
    """One line: the obstacles, on how many nodes, and the largest available size where it is known."""
    count, reasons = _parsed(message)
    if found := re.search(r'persistentvolumeclaim "([^"]+)" (not found|is being deleted)', message):
        return f'no node takes it: the volume claim "{found[1]}" {found[2]}'
    if not reasons:
        return f"no node takes it: {' '.join(message.split())}" if message else "no node takes it yet"
    words = "; ".join(_reason_text(number_, reason, count) for number_, reason in reasons)
    text = f"no node can take it now: {words}"
    too_large = _too_large(wanted, nodes) if nodes else ""
    return f"{text}. {too_large}" if too_large else text


def lacks_room(message: str) -> bool:
    """Whether a node could take the pod if others had not taken its resources."""
    return any(reason.startswith(("Insufficient ", "Too many pods")) for _, reason in _parsed(message)[1])


def _parsed(message: str) -> tuple[int, list[tuple[int, str]]]:
    """`0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had ... . preemption: ...`"""
    found = re.match(r"\s*\d+/(\d+) nodes? (?:is|are) available: (.*)", message, re.DOTALL)
    if found is None:
        return 0, []
    rest = re.split(r"\.\s+(?:preemption|no new claims)|, preemption:", found[2], maxsplit=1)[0].rstrip(". ")
    reasons = []
    for part in re.split(r", (?=\d+ )", rest):
        if item := re.match(r"(\d+) (.*)", part.strip(), re.DOTALL):
            reasons.append((int(item[1]), item[2].strip()))
    return int(found[1]), reasons


def _reason_text(number_: int, reason: str, count: int) -> str:
    of = f"{number_} of {count} nodes" if count != 1 else "the only node"
    have, do = ("have", "do") if number_ != 1 and count != 1 else ("has", "does")
    if found := re.match(r"Insufficient (.+)", reason):
        return f"{of} {have} too little {_resource(found[1])} free"
    if found := re.match(r"node\(s\) had (?:untolerated )?taint(?:s|\(s\))? \{?([^}]*)\}?", reason):
        taint = found[1].strip().rstrip(":").strip()
        known = _TAINTS.get(taint.split(":")[0].split("=")[0])
        are = "are" if have == "have" else "is"
        return f"{of} {are} {known}" if known else f"{of} {have} the taint {taint}"
    if "node affinity/selector" in reason:
        return f"{of} {do} not belong to the pool"
    if found := re.match(r"node\(s\) were (.+)", reason):
        return f"{of} {'are' if have == 'have' else 'is'} {found[1]}"
    if reason == "Too many pods":
        return f"{of} {have} as many pods as allowed"
    return f"{of}: {reason}"


_TAINTS = {
    "node.kubernetes.io/unreachable": "unreachable",
    "node.kubernetes.io/not-ready": "not ready",
    "node.kubernetes.io/unschedulable": "cordoned",
    "node.kubernetes.io/disk-pressure": "short of disk",
    "node.kubernetes.io/memory-pressure": "short of memory",
}


def _too_large(wanted: PodRequest, nodes: Sequence[Object]) -> str:
    """The resource that no node has even when empty, and the largest available amount."""
    sizes = [
        {key: number(value) for key, value in ((n.get("status") or {}).get("allocatable") or {}).items()}
        for n in nodes
    ]
    if not sizes:
        return "The cluster has no nodes"
    for name, amount in wanted.amounts().items():
        largest = max(one.get(name, 0) for one in sizes)
        if amount > largest:
            has = _amount(name, float(largest)) if largest else "none"
            wants = f"{_amount(name, amount)} {_unit(name)}".strip()
            return f"It requests {wants}, and the largest node has {has}"
    amounts = wanted.amounts()
    if not any(all(one.get(name, 0) >= amount for name, amount in amounts.items()) for one in sizes):
        together = ", ".join(
            f"{_amount(name, amount)} {_unit(name)}".strip() for name, amount in amounts.items()
        )
        return f"It requests {together} on one node, and no node has all of it"
    return ""


def _resource(name: str) -> str:
    return {"ephemeral-storage": "disk", "cpu": "CPU"}.get(name, name)


def _amount(name: str, amount: float) -> str:
    if name == "cpu":
        return show_cores(amount)
    return readable_size(int(amount)) if name in ("memory", "ephemeral-storage") else f"{amount:g}"


def _unit(name: str) -> str:
    return {"cpu": "", "memory": "of memory", "ephemeral-storage": "of disk"}.get(name, name)


def _requests(one: Object) -> dict[str, Any]:
    """A limit without a request counts as a request too."""
    resources = one.get("resources") or {}
    whole = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {key: number(value) for key, value in whole.items()}


def _pod_level(spec: Object) -> dict[str, Any]:
    return {k: number(v) for k, v in ((spec.get("resources") or {}).get("requests") or {}).items()}


def _added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}


def _larger(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {key: max(one.get(key, 0), other.get(key, 0)) for key in {**one, **other}}
