"""NetworkPolicies as rules: every kind of peer, port and selector, checked by the kernel's own parser."""

from __future__ import annotations

import subprocess

import pytest
from harness.policies import rules


def pod(
    name: str, address: str, namespace: str = "home", ports: list[dict] | None = None, **status: str
) -> dict:
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {"containers": [{"name": "main", "ports": ports or []}]},
        "status": {"podIP": address, "phase": "Running", **status},
    }


PODS = [
    pod(
        "server",
        "10.0.0.1",
        ports=[{"name": "web", "containerPort": 80}, {"name": "web6", "containerPort": 81}],
    ),
    pod("friend", "10.0.0.2"),
    pod("far", "10.0.0.3", "away"),
    pod("over", "10.0.0.4", phase="Succeeded"),
]
NAMESPACES = [{"metadata": {"name": name, "labels": {"name": name}}} for name in ("home", "away")]


def made(**spec: object) -> str:
    """The rules of one policy for the server, checked by nft."""
    spec.setdefault("podSelector", {"matchLabels": {"app": "server"}})
    policy = {"metadata": {"name": "policy", "namespace": "home"}, "spec": spec}
    script = rules("stoker-check", [policy], PODS, NAMESPACES)
    done = subprocess.run(["nft", "-c", "-f", "-"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}\n{script}"
    return script


def chain(script: str, name: str) -> str:
    [line] = [line for line in script.splitlines() if line.strip().startswith(f"chain {name} ")]
    return line.partition("{ ")[2].rpartition(" }")[0].strip()


def test_no_policy_no_rule():
    script = rules("stoker-check", [], PODS, NAMESPACES)
    assert "drop" not in script


@pytest.mark.parametrize(
    ("ingress", "expected"),
    [
        ([], "drop;"),
        ([{}], "return; drop;"),
        ([{"ports": [{"port": 80}]}], "tcp dport 80 return; drop;"),
        ([{"ports": [{"port": 80, "endPort": 90, "protocol": "UDP"}]}], "udp dport 80-90 return; drop;"),
        ([{"ports": [{"protocol": "UDP"}]}], "meta l4proto udp return; drop;"),
        ([{"ports": [{"port": "web"}]}], "tcp dport 80 return; drop;"),
        ([{"ports": [{"port": "nothing"}]}], "drop;"),
        ([{"from": [{"podSelector": {}}]}], "ip saddr { 10.0.0.1, 10.0.0.2 } return; drop;"),
        (
            [{"from": [{"namespaceSelector": {"matchLabels": {"name": "away"}}}]}],
            "ip saddr { 10.0.0.3 } return; drop;",
        ),
        ([{"from": [{"podSelector": {"matchLabels": {"app": "nobody"}}}]}], "drop;"),
        ([{"from": [{"ipBlock": {"cidr": "10.9.0.0/16"}}]}], "ip saddr 10.9.0.0/16 return; drop;"),
        (
            [{"from": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.9.0.0/16"]}}]}],
            "ip saddr != 10.9.0.0/16 return; drop;",
        ),
        ([{"from": [{"ipBlock": {"cidr": "::/0"}}]}], "drop;"),
    ],
)
def test_ingress_rules(ingress, expected):
    assert chain(made(ingress=ingress), "ingress_10_0_0_1") == expected


@pytest.mark.parametrize(
    ("expression", "addresses"),
    [
        ({"operator": "In", "values": ["friend"]}, "10.0.0.2"),
        ({"operator": "NotIn", "values": ["friend"]}, "10.0.0.1"),
        ({"operator": "Exists"}, "10.0.0.1, 10.0.0.2"),
        ({"operator": "DoesNotExist"}, ""),
    ],
)
def test_selectors(expression, addresses):
    selector = {"matchExpressions": [{"key": "app", **expression}]}
    script = made(ingress=[{"from": [{"podSelector": selector}]}])
    expected = f"ip saddr {{ {addresses} }} return; drop;" if addresses else "drop;"
    assert chain(script, "ingress_10_0_0_1") == expected


def test_only_selected_pods_and_directions_are_restricted():
    script = made(policyTypes=["Egress"], egress=[{"to": [{"podSelector": {}}], "ports": [{"port": "web"}]}])
    assert chain(script, "egress_10_0_0_1") == "ip daddr { 10.0.0.1 } tcp dport 80 return; drop;"
    assert "ingress_" not in script
    assert "10_0_0_2" not in script


def test_a_reused_address_belongs_to_its_newest_pod():
    late = {**pod("late", "10.0.0.1")}
    late["metadata"] = {**late["metadata"], "creationTimestamp": "2026-01-02T00:00:00Z"}
    early = {**PODS[0], "metadata": {**PODS[0]["metadata"], "creationTimestamp": "2026-01-01T00:00:00Z"}}
    policy = {
        "metadata": {"name": "p", "namespace": "home"},
        "spec": {"podSelector": {"matchLabels": {"app": "server"}}},
    }
    assert "drop" not in rules("stoker-check", [policy], [late, early], NAMESPACES)
    assert "drop" in rules("stoker-check", [policy], [early], NAMESPACES)
