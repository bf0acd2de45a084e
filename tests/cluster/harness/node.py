"""One node: its own containerd and kubelet, with all their files in its own directory."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from harness import cgroups, mounts, network
from harness.api import Api, until
from harness.binaries import binary
from harness.errors import HarnessError
from harness.layout import Layout
from harness.pki import Authority
from harness.processes import NICENESS, Ledger, Process, kill, marked

__all__ = ["Node"]

_SHARED = ("/var/log/pods", "/var/log/containers", "/var/lib/cni", "/var/lib/kubelet", "/run/containerd")
"""Fixed paths of kubelet and containerd; each node has its own directories there."""


class Node:
    """A node of the cluster, numbered from 1. Only one caller at a time may change it."""

    def __init__(self, layout: Layout, ledger: Ledger, index: int) -> None:
        self._layout = layout
        self._ledger = ledger
        self._api = Api(layout)
        self._index = index
        self.name = f"node-{index}"
        self.root = layout.root / self.name
        self.address = layout.node_address(index)
        self.group = f"{layout.cgroup}/{self.name}"

    @property
    def socket(self) -> Path:
        return self.root / "containerd.sock"

    def certify(self, authority: Authority) -> None:
        authority.issue(f"{self.name}-server", self.address, self.name, user=f"system:node:{self.name}")
        authority.kubeconfig(self.name, user=f"system:node:{self.name}", group="system:nodes")

    def configure(self, registry: str, pause: str) -> None:
        for folder in ("root", "state", "kubelet"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        network.pod_network(self.root / "cni", self._layout, self._index)
        hosts = self.root / "registries" / registry
        hosts.mkdir(parents=True, exist_ok=True)
        (hosts / "hosts.toml").write_text(
            f'[host."http://{registry}"]\n  capabilities = ["pull", "resolve"]\n'
        )
        (self.root / "containerd.toml").write_text(self._containerd(pause))
        (self.root / "kubelet.yaml").write_text(yaml.safe_dump(self._kubelet()))

    def start(self) -> None:
        """Start the agents that are not running; returns at once."""
        cgroups.make(self.group)
        mounts.isolate(self._mounts, {Path(path): self.root / "own" / path[1:] for path in _SHARED})
        if not self._runs("containerd"):
            path = f"{binary('containerd-shim-runc-v2').parent}:{os.environ['PATH']}"
            argv: list[str | Path] = [binary("containerd"), "--config", self.root / "containerd.toml"]
            self._start("containerd", argv, env={"PATH": path, "OTEL_SDK_DISABLED": "true"})
            self._wait("containerd", self._listens)
        if not self._runs("kubelet"):
            argv = [binary("kubelet"), f"--config={self.root / 'kubelet.yaml'}"]
            argv += [f"--kubeconfig={self._layout.pki / f'{self.name}.kubeconfig'}"]
            argv += [f"--root-dir={self.root / 'kubelet'}", f"--hostname-override={self.name}"]
            argv += [f"--node-ip={self.address}", f"--cert-dir={self.root / 'kubelet'}", "--v=1"]
            argv += [f"--node-labels=stoker.test/node={self.name}"]
            self._ledger.note(f"{self.name}.started", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
            self._start("kubelet", ["nice", "-n", NICENESS, *argv])

    def wait(self) -> None:
        """Wait until the control plane knows that the current kubelet is ready."""
        self._wait("kubelet", self.ready)

    def ready(self) -> bool:
        status, said = self._api.raw("GET", f"/api/v1/nodes/{self.name}")
        if status != 200:
            return False
        since = str(self._ledger.read().get(f"{self.name}.started"))
        return any(
            each["type"] == "Ready" and each["status"] == "True" and each["lastHeartbeatTime"] > since
            for each in json.loads(said)["status"].get("conditions", [])
        )

    def orphan(self) -> None:
        """End kubelet and containerd at once; the pods continue and stay connected."""
        for part in ("kubelet", "containerd"):
            self._ledger.kill(f"{self.name}-{part}")

    def lose(self) -> None:
        """End the node with all that runs on it; its disk is kept."""
        self.orphan()
        self.end_pods()
        mounts.unmount(self.root)
        shutil.rmtree(self.root / "state", ignore_errors=True)
        (self.root / "state").mkdir()

    def end_pods(self) -> None:
        """Kill shims first: a shim would clean up after its container, which a lost machine does not do."""
        cgroups.thaw_all(self.group)
        socket = str(self.socket).encode()
        shims = [each for each in marked(self._layout.root) if socket in _arguments(each)]
        inside = [process for pid in cgroups.members(self.group) if (process := Process.of(pid))]
        kill([*shims, *inside])

    def resource(self, name: str, amount: int) -> None:
        """Offer an extended resource, as a device plugin would."""
        key = name.replace("/", "~1")
        places = (f"/status/{part}/{key}" for part in ("capacity", "allocatable"))
        patch = [{"op": "add", "path": place, "value": str(amount)} for place in places]
        self._api("PATCH", f"/api/v1/nodes/{self.name}/status", patch, "application/json-patch+json")

    @property
    def _mounts(self) -> Path:
        """The file of the node's mount namespace."""
        return self.root / "namespace" / "mounts"

    def _listens(self) -> bool:
        """Connects, since the socket's file survives a containerd that was killed."""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
            return True

    def _start(self, part: str, argv: list[str | Path], env: dict[str, str] | None = None) -> None:
        self._ledger.start(f"{self.name}-{part}", [*mounts.enter(self._mounts), *argv], env=env)

    def _runs(self, part: str) -> bool:
        process = self._ledger.find(f"{self.name}-{part}")
        return process is not None and process.alive

    def _wait(self, part: str, condition: Callable[[], bool]) -> None:
        name = f"{self.name}-{part}"

        def met() -> bool:
            if not self._runs(part):
                raise HarnessError(f"{part} of {self.name} ended:\n{self._ledger.tail(name)}")
            return condition()

        until(met, f"{part} of {self.name}", evidence=lambda: self._ledger.tail(name))

    def _containerd(self, pause: str) -> str:
        unused = [
            f"io.containerd.snapshotter.v1.{name}"
            for name in ("btrfs", "zfs", "devmapper", "blockfile", "erofs")
        ]
        runtime = "plugins.'io.containerd.cri.v1.runtime'"
        images = "plugins.'io.containerd.cri.v1.images'"
        return f"""\
version = 3
root = "{self.root / "root"}"
state = "{self.root / "state"}"
disabled_plugins = {unused + ["io.containerd.nri.v1.nri"]}

[grpc]
  address = "{self.socket}"

[{images}.pinned_images]
  sandbox = "{pause}"

[{images}.registry]
  config_path = "{self.root / "registries"}"

[{runtime}]
  # Without CAP_SYS_RESOURCE nothing may ask to be spared by the kernel.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true

[{runtime}.cni]
  bin_dirs = ["/usr/lib/cni", "/opt/cni/bin"]
  conf_dir = "{self.root / "cni"}"

[{runtime}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[{runtime}.containerd.runtimes.runc.options]
  SystemdCgroup = false
  Root = "{self.root / "state" / "runc"}"
"""

    def _kubelet(self) -> dict[str, object]:
        pki = self._layout.pki
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "healthzPort": 0,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(pki / f"{self.name}-server.crt"),
            "tlsPrivateKeyFile": str(pki / f"{self.name}-server.key"),
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "cgroupDriver": "cgroupfs",
            # Each kubelet removes unknown groups, but only below its own group.
            "cgroupRoot": f"/{self.group}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "oomScoreAdj": 0,
            "makeIPTablesUtilChains": False,
            "clusterDNS": [self._layout.dns],
            "clusterDomain": "cluster.local",
            # The disk of a test machine is often full; its nodes must not report pressure.
            "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "serializeImagePulls": False,
            "registryPullQPS": 0,
            "eventRecordQPS": 0,
            "kubeAPIQPS": 200,
            "kubeAPIBurst": 400,
            "nodeLeaseDurationSeconds": 12,
            "nodeStatusUpdateFrequency": "3s",
        }


def _arguments(process: Process) -> list[bytes]:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
