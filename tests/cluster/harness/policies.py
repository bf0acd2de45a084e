"""NetworkPolicies and the pods they select become the rules of one nft table.

Rules apply when a connection opens: first the egress rules of its source, then the ingress rules of its
destination. The machine itself reaches every pod, as a node always may.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

__all__ = ["NAMESPACES", "PODS", "POLICIES", "rules"]

POLICIES = "/apis/networking.k8s.io/v1/networkpolicies"
PODS = "/api/v1/pods"
NAMESPACES = "/api/v1/namespaces"
_ANYWHERE = "0.0.0.0/0"

Found = Mapping[str, Any]


def rules(table: str, policies: Iterable[Found], pods: Iterable[Found], namespaces: Iterable[Found]) -> str:
    """A script that replaces the table in one step."""
    world = _World(list(pods), {each["metadata"]["name"]: _labels(each) for each in namespaces})
    policies = list(policies)
    chains: list[str] = []
    verdicts: dict[str, list[str]] = {"Egress": [], "Ingress": []}
    for pod in world.pods:
        for direction, found in verdicts.items():
            chosen = [each for each in policies if _applies(each, pod, direction)]
            if chosen:
                name = f"{direction.lower()}_{pod['status']['podIP'].replace('.', '_')}"
                lines = sorted({line for each in chosen for line in _allowed(world, each, pod, direction)})
                chains.append(f"  chain {name} {{ {' '.join(f'{line} return;' for line in lines)} drop; }}")
                found.append(f"{pod['status']['podIP']} : jump {name}")
    return "\n".join(
        [
            f"table ip {table} {{}}",
            f"delete table ip {table}",
            f"table ip {table} {{",
            *sorted(chains),
            _map("sources", verdicts["Egress"]),
            _map("targets", verdicts["Ingress"]),
            "  chain through { type filter hook forward priority -10; ct state established,related accept;",
            "    ip saddr vmap @sources; ip daddr vmap @targets; }",
            "  chain inwards { type filter hook input priority -10; ct state established,related accept;",
            "    ip saddr vmap @sources; }",
            "}\n",
        ]
    )


class _World:
    """The pods that have their own address, and the labels of their namespaces."""

    def __init__(self, pods: list[Found], namespaces: dict[str, Mapping[str, str]]) -> None:
        # An address that a lost pod still has may belong to a newer pod.
        ordered = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
        self.pods = list({pod["status"]["podIP"]: pod for pod in ordered if _has_address(pod)}.values())
        self._namespaces = namespaces

    def matching(self, peer: Found, home: str) -> list[Found]:
        """The pods that `peer` selects in a policy of the namespace `home`."""
        where, which = peer.get("namespaceSelector"), peer.get("podSelector")
        return [
            pod
            for pod in self.pods
            if (
                _namespace(pod) == home
                if where is None
                else _matches(where, self._namespaces.get(_namespace(pod), {}))
            )
            and (which is None or _matches(which, _labels(pod)))
        ]


def _allowed(world: _World, policy: Found, pod: Found, direction: str) -> Iterator[str]:
    """Conditions, each of which allows a connection of the pod."""
    side, peers = ("saddr", "from") if direction == "Ingress" else ("daddr", "to")
    for rule in policy["spec"].get(direction.lower()) or []:
        for block, others in _peers(world, rule.get(peers) or [], policy["metadata"]["namespace"]):
            for port in rule.get("ports") or [None]:
                if port is None or not isinstance(port.get("port"), str):
                    yield f"{_from(side, block, others)} {_port(port)}".strip()
                elif direction == "Ingress":
                    for number in _named(pod, port):
                        yield f"{_from(side, block, others)} {_port({**port, 'port': number})}".strip()
                else:
                    for other in others:
                        for number in _named(other, port):
                            yield f"{_from(side, '', [other])} {_port({**port, 'port': number})}"


def _peers(world: _World, peers: list[Found], home: str) -> Iterator[tuple[str, list[Found]]]:
    """Each peer as an address condition or as the selected pods; no peers means every address."""
    if not peers:
        yield _ANYWHERE, []
    for peer in peers:
        if block := peer.get("ipBlock"):
            if ":" in block["cidr"]:
                continue  # pods here have no such address
            excepted = block.get("except") or []
            yield f"{block['cidr']}{''.join(f' != {each}' for each in excepted)}", []
        elif found := world.matching(peer, home):
            yield "", found


def _from(side: str, block: str, others: list[Found]) -> str:
    if others:
        return f"ip {side} {{ {', '.join(sorted(each['status']['podIP'] for each in others))} }}"
    cidr, *excepted = block.split(" != ")
    parts = [] if cidr == _ANYWHERE else [f"ip {side} {cidr}"]
    return " ".join([*parts, *(f"ip {side} != {each}" for each in excepted)])


def _port(port: Found | None) -> str:
    if port is None:
        return ""
    protocol = port.get("protocol", "TCP").lower()
    if port.get("port") is None:
        return f"meta l4proto {protocol}"
    last = f"-{port['endPort']}" if port.get("endPort") else ""
    return f"{protocol} dport {port['port']}{last}"


def _named(pod: Found, port: Found) -> list[int]:
    spec = pod["spec"]
    return [
        each["containerPort"]
        for container in [*spec["containers"], *spec.get("initContainers", [])]
        for each in container.get("ports", [])
        if each.get("name") == port["port"] and each.get("protocol", "TCP") == port.get("protocol", "TCP")
    ]


def _applies(policy: Found, pod: Found, direction: str) -> bool:
    spec = policy["spec"]
    kinds = spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]
    home = policy["metadata"]["namespace"] == _namespace(pod)
    return direction in kinds and home and _matches(spec.get("podSelector") or {}, _labels(pod))


def _matches(selector: Found, labels: Mapping[str, str]) -> bool:
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_holds(each, labels) for each in selector.get("matchExpressions") or [])


def _holds(expression: Found, labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or []
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    raise ValueError(f"unknown operator {expression['operator']}")


def _has_address(pod: Found) -> bool:
    over = pod["status"].get("phase") in ("Succeeded", "Failed")
    return bool(pod["status"].get("podIP")) and not pod["spec"].get("hostNetwork") and not over


def _labels(found: Found) -> Mapping[str, str]:
    return found["metadata"].get("labels") or {}


def _namespace(found: Found) -> str:
    return str(found["metadata"]["namespace"])


def _map(name: str, elements: list[str]) -> str:
    inside = f" elements = {{ {', '.join(sorted(elements))} }};" if elements else ""
    return f"  map {name} {{ type ipv4_addr : verdict;{inside} }}"
