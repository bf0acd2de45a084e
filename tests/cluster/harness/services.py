"""The addresses of Services, as rules of one nft table that forward a connection to one of the endpoints.

A real kube-proxy would write rules for the whole machine, so only one of several clusters could have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

__all__ = ["ENDPOINTS", "SERVICES", "rules"]

SERVICES = "/api/v1/services"
ENDPOINTS = "/apis/discovery.k8s.io/v1/endpointslices"

Found = Mapping[str, Any]


def rules(table: str, services: Iterable[Found], slices: Iterable[Found]) -> str:
    """A script that replaces the table in one step."""
    sending, returning = [], set()
    slices = list(slices)
    for service in services:
        address = service["spec"].get("clusterIP") or "None"
        if address == "None" or ":" in address:
            continue
        for port in service["spec"].get("ports") or []:
            protocol = port.get("protocol", "TCP").lower()
            endpoints = sorted(_endpoints(service, port, slices))
            for number, (host, target) in enumerate(endpoints):
                choice = (
                    f"numgen random mod {len(endpoints) - number} 0 " if number + 1 < len(endpoints) else ""
                )
                to = f"ip daddr {address} {protocol} dport {port['port']} {choice}dnat to {host}:{target}"
                sending.append(f"    {to}")
                # A pod that is forwarded to itself must not see its own address as the source.
                returning.add(f"    ct status dnat ip saddr {host} ip daddr {host} masquerade")
    return "\n".join(
        [
            f"table ip {table} {{}}",
            f"delete table ip {table}",
            f"table ip {table} {{",
            "  chain services {",
            *sending,
            "  }",
            "  chain pods { type nat hook prerouting priority -100; jump services; }",
            "  chain machine { type nat hook output priority -100; jump services; }",
            "  chain back { type nat hook postrouting priority 80;",
            *sorted(returning),
            "  }",
            "}\n",
        ]
    )


def _endpoints(service: Found, port: Found, slices: list[Found]) -> Iterator[tuple[str, int]]:
    """The ready endpoints of the service's port."""
    meta = service["metadata"]
    for each in slices:
        of = (each["metadata"].get("labels") or {}).get("kubernetes.io/service-name")
        if each["metadata"]["namespace"] != meta["namespace"] or of != meta["name"]:
            continue
        if each.get("addressType") != "IPv4":
            continue
        for target in each.get("ports") or []:
            if (target.get("name") or "") != (port.get("name") or "") or not target.get("port"):
                continue
            for endpoint in each.get("endpoints") or []:
                if (endpoint.get("conditions") or {}).get("ready") is not False:
                    yield from ((address, int(target["port"])) for address in endpoint["addresses"])
