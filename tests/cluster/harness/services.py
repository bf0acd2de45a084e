"""What only some tests need of a cluster: the addresses of Services (kube-proxy), and their names (CoreDNS).

kube-proxy's rules are the machine's, so of the clusters on one machine only one can have Services.
"""

from __future__ import annotations

from urllib.request import urlopen

from harness.api import until
from harness.binaries import binary
from harness.errors import HarnessError, command
from harness.layout import Layout
from harness.processes import Ledger

__all__ = ["remains", "remove", "start_names", "start_proxy"]

_PROXY = "kube-proxy"


def start_proxy(layout: Layout, ledger: Ledger) -> None:
    """Give Services their addresses. Both nodes are one machine to the network, so one proxy is both nodes'."""
    if _runs(ledger, _PROXY):
        return
    if ":KUBE-SERVICES" in command(["iptables-save"]):
        raise HarnessError(
            "another cluster on this machine has Services already, and its rules are the machine's"
        )
    argv = [
        binary(_PROXY),
        f"--kubeconfig={layout.pki / f'{_PROXY}.kubeconfig'}",
        "--hostname-override=node-1",
    ]
    argv += ["--proxy-mode=iptables", f"--cluster-cidr={layout.network}", f"--bind-address={layout.control}"]
    argv += ["--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0s"]
    argv += ["--conntrack-tcp-timeout-close-wait=0s", "--iptables-min-sync-period=100ms"]
    argv += [
        f"--healthz-bind-address={layout.control}:10256",
        f"--metrics-bind-address={layout.control}:10249",
    ]
    ledger.start(_PROXY, argv)
    until(lambda: bool(remains(layout)), "the first Service's rules", evidence=lambda: ledger.tail(_PROXY))


def start_names(layout: Layout, ledger: Ledger) -> None:
    """Resolve the names of Services and pods in every pod started from now on or before."""
    if _runs(ledger, "coredns"):
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
        lambda: _answers(f"http://{layout.dns}:8181/ready"),
        "CoreDNS",
        evidence=lambda: ledger.tail("coredns"),
    )


def remove(layout: Layout) -> None:
    """Take kube-proxy's rules back; it is not running any more. One chain it leaves, as a kubelet may share it."""
    if not remains(layout):
        return
    command([binary(_PROXY), "--cleanup", f"--kubeconfig={layout.pki / f'{_PROXY}.kubeconfig'}"])
    for program in ("iptables", "ip6tables"):
        for chain in ("INPUT", "OUTPUT"):
            command([program, "-w", "-D", chain, "-j", "KUBE-FIREWALL"], check=False)
        for verb in ("-F", "-X"):
            command([program, "-w", verb, "KUBE-FIREWALL"], check=False)


def remains(layout: Layout) -> list[str]:
    first = f"-d {layout.first_service}/32"
    return [f"rule {line}" for line in command(["iptables-save"]).splitlines() if first in line]


def _runs(ledger: Ledger, name: str) -> bool:
    process = ledger.find(name)
    return process is not None and process.alive


def _answers(address: str) -> bool:
    try:
        with urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
