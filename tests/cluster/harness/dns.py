"""The names of Services and pods: CoreDNS, for tests that need it."""

from __future__ import annotations

from harness.api import answers, until
from harness.binaries import binary
from harness.layout import Layout
from harness.processes import Ledger

__all__ = ["start"]


def start(layout: Layout, ledger: Ledger) -> None:
    """Start CoreDNS unless it runs. Every kubelet configures its pods to use this address."""
    process = ledger.find("coredns")
    if process is not None and process.alive:
        return
    config = layout.root / "Corefile"
    config.write_text(
        f""".:53 {{
  bind {layout.dns}
  errors
  ready {layout.dns}:8181
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {layout.kubeconfig}
    pods insecure
  }}
  forward . /etc/resolv.conf
}}
"""
    )
    ledger.start("coredns", [binary("coredns"), "-conf", config])
    until(
        lambda: answers(f"http://{layout.dns}:8181/ready"),
        "CoreDNS",
        evidence=lambda: ledger.tail("coredns"),
    )
