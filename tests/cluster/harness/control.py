"""etcd, the API server, the controllers and the scheduler, as a cluster's operator would start them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from urllib.request import Request, urlopen

from harness.api import Api, until
from harness.binaries import binary
from harness.errors import HarnessError
from harness.layout import Layout
from harness.pki import Authority
from harness.processes import NICENESS, Ledger

__all__ = ["Control"]


class Control:
    """The control plane of one cluster. Each part can be ended and started again, and keeps its data."""

    def __init__(self, layout: Layout, ledger: Ledger) -> None:
        self._layout = layout
        self._ledger = ledger
        self._api = Api(layout)

    def certify(self, authority: Authority) -> None:
        control, first = self._layout.control, self._layout.first_service
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost", "127.0.0.1")
        authority.issue("apiserver", control, first, *names, user="kube-apiserver")
        authority.issue("kubelet-client", user="kube-apiserver-kubelet-client", group="system:masters")
        authority.service_accounts()
        for name in ("kube-controller-manager", "kube-scheduler"):
            authority.kubeconfig(name, user=f"system:{name}")
        admin = authority.kubeconfig("admin", user="admin", group="system:masters")
        self._layout.kubeconfig.write_bytes(admin.read_bytes())
        self._layout.kubeconfig.chmod(0o600)

    def start(self) -> None:
        self.start_etcd()
        self.start_api()
        self.start_controllers()

    def start_etcd(self) -> None:
        client, peer = f"http://{self._layout.control}:2379", f"http://{self._layout.control}:2380"
        argv: list[str | Path] = [
            binary("etcd"),
            "--name=test",
            f"--data-dir={self._layout.root / 'etcd'}",
            "--unsafe-no-fsync",
        ]
        argv += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        argv += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        argv += [f"--initial-cluster=test={peer}", "--log-level=warn", "--quota-backend-bytes=8589934592"]
        self._start("etcd", argv)
        self._wait("etcd", self._etcd_answers)

    def start_api(self) -> None:
        layout = self._layout
        argv: list[str | Path] = [
            binary("kube-apiserver"),
            f"--bind-address={layout.control}",
            f"--advertise-address={layout.control}",
            "--secure-port=6443",
            f"--etcd-servers=http://{layout.control}:2379",
            f"--service-cluster-ip-range={layout.services}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--service-account-issuer={layout.server}",
            f"--service-account-key-file={layout.pki / 'accounts.pub'}",
            f"--service-account-signing-key-file={layout.pki / 'accounts.key'}",
            f"--client-ca-file={layout.pki / 'ca.crt'}",
            f"--tls-cert-file={layout.pki / 'apiserver.crt'}",
            f"--tls-private-key-file={layout.pki / 'apiserver.key'}",
            f"--kubelet-certificate-authority={layout.pki / 'ca.crt'}",
            f"--kubelet-client-certificate={layout.pki / 'kubelet-client.crt'}",
            f"--kubelet-client-key={layout.pki / 'kubelet-client.key'}",
            "--kubelet-preferred-address-types=InternalIP",
            "--max-requests-inflight=1600",
            "--max-mutating-requests-inflight=800",
            "--shutdown-delay-duration=0s",
        ]
        self._start("kube-apiserver", argv)
        self.wait_api()

    def wait_api(self) -> None:
        self._wait("kube-apiserver", self._api.answers)

    def start_controllers(self) -> None:
        layout = self._layout
        self.start_manager()
        config = f"--kubeconfig={layout.pki / 'kube-scheduler.kubeconfig'}"
        argv = [binary("kube-scheduler"), config, f"--bind-address={layout.control}", "--leader-elect=false"]
        self._start("kube-scheduler", [*argv, "--kube-api-qps=400", "--kube-api-burst=800"])

    def start_manager(self, missed_after: int = 14) -> None:
        """`missed_after`: seconds without a node's report until it counts as not ready. The default of a
        minute is too long for tests; the kubelets report often enough (node.py)."""
        layout = self._layout
        config = f"--kubeconfig={layout.pki / 'kube-controller-manager.kubeconfig'}"
        argv: list[str | Path] = [
            binary("kube-controller-manager"),
            config,
            f"--bind-address={layout.control}",
        ]
        argv += ["--leader-elect=false", "--use-service-account-credentials=true"]
        argv += ["--kube-api-qps=400", "--kube-api-burst=800", "--concurrent-job-syncs=20"]
        argv += [f"--root-ca-file={layout.pki / 'ca.crt'}"]
        argv += [f"--service-account-private-key-file={layout.pki / 'accounts.key'}"]
        argv += [f"--node-monitor-grace-period={missed_after}s", "--node-monitor-period=2s"]
        self._start("kube-controller-manager", argv)

    def compact(self) -> None:
        """Drop all revisions but the last from etcd."""
        key = base64.b64encode(b"\0").decode()
        seen = self._etcd("/v3/kv/range", {"key": key, "range_end": key, "count_only": True})
        self._etcd("/v3/kv/compaction", {"revision": seen["header"]["revision"], "physical": True})

    def _etcd(self, path: str, body: object) -> dict[str, dict[str, str]]:
        address = f"http://{self._layout.control}:2379{path}"
        with urlopen(Request(address, json.dumps(body).encode()), timeout=30) as answer:
            said: dict[str, dict[str, str]] = json.load(answer)
        return said

    def _etcd_answers(self) -> bool:
        try:
            with urlopen(f"http://{self._layout.control}:2379/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _start(self, name: str, argv: list[str | Path]) -> None:
        self._ledger.start(name, ["nice", "-n", NICENESS, *argv])

    def _wait(self, name: str, condition: Callable[[], bool]) -> None:
        def ready() -> bool:
            process = self._ledger.find(name)
            if process is None or not process.alive:
                raise HarnessError(f"{name} ended:\n{self._ledger.tail(name)}")
            return condition()

        until(ready, f"{name} to be ready", evidence=lambda: self._ledger.tail(name))
