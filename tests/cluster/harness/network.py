"""The machine's part of the cluster's network: addresses, forwarding, and the rules that isolate a pod.

Each pod has a routed pair of interfaces (`ptp`), so all traffic between pods passes the machine's rules, on
one node too. The rules are in the cluster's own nft tables.
"""

from __future__ import annotations

import json
from pathlib import Path

from harness.errors import command
from harness.layout import Layout

__all__ = ["cut", "heal", "pod_network", "remains", "remove", "setup"]


def setup(layout: Layout, addresses: list[str]) -> None:
    command(["ip", "link", "add", layout.link, "type", "bridge"])
    for address in addresses:
        command(["ip", "address", "add", f"{address}/32", "dev", layout.link])
    command(["ip", "link", "set", layout.link, "up"])
    # The machine's own connections to Services start from a cluster address. Connections to unknown Services
    # stay here.
    command(["ip", "route", "add", layout.services, "dev", layout.link])
    command(["nft", "-f", "-"], input=_rules(layout))
    for direction in ("-s", "-d"):
        command(["iptables", "-w", "-I", "FORWARD", *_accept(layout, direction)])


def remove(layout: Layout) -> None:
    command(["ip", "link", "delete", layout.link], check=False)
    for table in layout.tables:
        command(["nft", "delete", "table", "ip", table], check=False)
    for direction in ("-s", "-d"):
        command(["iptables", "-w", "-D", "FORWARD", *_accept(layout, direction)], check=False)


def remains(layout: Layout) -> list[str]:
    """What is left of the network, one line each."""
    links = command(["ip", "-br", "link"]).split()
    routes = command(["ip", "route", "show", "root", layout.network]).splitlines()
    tables = command(["nft", "list", "tables"]).split()
    rules = command(["iptables-save"]).splitlines()
    return [
        *(f"link {name}" for name in links if name == layout.link),
        *(f"route {line}" for line in routes),
        *(f"table {name}" for name in tables if name in layout.tables),
        *(f"rule {line}" for line in rules if f"--comment {layout.table} " in line),
    ]


def cut(layout: Layout, address: str) -> None:
    """Drop all packets to and from the address, on open connections too."""
    command(["nft", "add", "element", "ip", layout.table, "cut", f"{{ {address} }}"])


def heal(layout: Layout, address: str) -> None:
    command(["nft", "delete", "element", "ip", layout.table, "cut", f"{{ {address} }}"])


def pod_network(directory: Path, layout: Layout, index: int) -> None:
    """The CNI configuration of node `index`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "cniVersion": "1.0.0",
        "name": f"{layout.link}-{index}",
        "plugins": [
            {
                "type": "ptp",
                "ipam": {
                    "type": "host-local",
                    "dataDir": str(directory / "addresses"),
                    "ranges": [[{"subnet": layout.pods(index)}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }
    (directory / "10-pods.conflist").write_text(json.dumps(config, indent=1))


def _accept(layout: Layout, direction: str) -> list[str]:
    """Machines with a container engine drop forwarded packets unless a rule accepts them."""
    return [direction, layout.network, "-j", "ACCEPT", "-m", "comment", "--comment", layout.table]


def _rules(layout: Layout) -> str:
    cutting = "ip saddr @cut drop; ip daddr @cut drop"
    return f"""
table ip {layout.table} {{
  set cut {{ type ipv4_addr; }}
  chain cut_in {{ type filter hook input priority -20; {cutting}; }}
  chain cut_through {{ type filter hook forward priority -20; {cutting}; }}
  chain cut_out {{ type filter hook output priority -20; {cutting}; }}
  chain leave {{
    type nat hook postrouting priority 90;
    ip saddr {layout.network} ip daddr != {{ {layout.network}, {layout.services} }} masquerade
  }}
}}
"""
