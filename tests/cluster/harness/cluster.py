"""The cluster as tests use it: start, inspect, break, repair, end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import cgroups, dns, machine, network, registry
from harness.api import Api, until
from harness.binaries import CORE, binary
from harness.catalog import TestImages
from harness.cleanup import clean
from harness.control import Control
from harness.errors import HarnessError, command
from harness.images import Image, busybox, push
from harness.layout import Layout, kubernetes_version, locked
from harness.node import Node
from harness.pki import Authority
from harness.processes import Ledger, Process
from harness.quick import Quick

__all__ = ["Cluster"]

GPU = "nvidia.com/gpu"
_HERE = Path(__file__).resolve().parents[1]


class Cluster:
    """A running cluster. Only one program at a time may break and repair it; any number may use it."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._ledger = Ledger(layout.state, layout.logs)
        self._control = Control(layout, self._ledger)
        self.api = Api(layout)
        self._quick = Quick(self.api)

    @classmethod
    def obtain(cls, layout: Layout | None = None, *, owner: int | None = None) -> Cluster:
        """The running cluster, or a new one. With `owner`, a new cluster ends with that process."""
        layout = layout or Layout()
        with locked(layout.lock):
            return cls.attach(layout) or cls._begin(layout, 2, owner)

    @classmethod
    def start(cls, layout: Layout | None = None, *, nodes: int = 2, owner: int | None = None) -> Cluster:
        """Clean up an earlier cluster and start a new one; returns when it is complete.

        With `owner`, a process id, the cluster ends when that process ends, for any reason.
        """
        layout = layout or Layout()
        with locked(layout.lock):
            return cls._begin(layout, nodes, owner)

    @classmethod
    def attach(cls, layout: Layout | None = None) -> Cluster | None:
        """The running cluster, if it has the wanted version, is complete, and has no owner."""
        cluster = cls(layout or Layout())
        noted = cluster._ledger.read()
        if noted.get("kubernetes") != kubernetes_version() or noted.get("owner"):
            return None
        return cluster if cluster.whole else None

    @property
    def whole(self) -> bool:
        """Whether all its processes run and the API server answers."""
        started = self._ledger.read().get("whole")
        running = {name for name, process in self._ledger.all().items() if process.alive}
        return isinstance(started, list) and running.issuperset(started) and self.api.answers()

    def stop(self) -> None:
        with locked(self._layout.lock):
            clean(self._layout)

    @property
    def owner(self) -> int | None:
        """The process that the cluster ends with."""
        noted: Any = self._ledger.read().get("owner")
        return noted[0] if noted else None

    @property
    def kubeconfig(self) -> Path:
        return self._layout.kubeconfig

    @property
    def registry(self) -> str:
        """host:port, the same for the nodes and this machine."""
        return str(self._ledger.read()["registry"])

    @property
    def images(self) -> Mapping[str, str]:
        """References by name of the test images in the registry; each is made on first use."""
        own: Any = self._ledger.read()["images"]
        return TestImages(own, self.registry)

    @property
    def nodes(self) -> tuple[str, ...]:
        names: Any = self._ledger.read()["nodes"]
        return tuple(names)

    @property
    def logs(self) -> Path:
        """The directory of the logs of the cluster's processes, NAME.log."""
        return self._layout.logs

    def kubectl(self, *argv: str, input: str | None = None) -> str:
        """The output of kubectl; frequent commands are answered without starting it."""
        said = self._quick(argv, input)
        if said is not None:
            return said
        return command([binary("kubectl"), f"--kubeconfig={self.kubeconfig}", *argv], input=input)

    def push(self, name: str, image: Image) -> str:
        """Push an image of the harness into the registry; returns its reference."""
        return push(self.registry, name, image)

    def services(self, *, names: bool = False) -> None:
        """Services always have working addresses; with `names`, their names resolve from now on."""
        if names:
            self.names()

    def names(self) -> None:
        """From now on the names of Services and pods resolve in pods."""
        dns.start(self._layout, self._ledger)

    def volume(
        self, name: str, *, size: str = "1Gi", mode: str = "ReadWriteOnce", path: Path | None = None
    ) -> Path:
        """Make a PersistentVolume of that name and storage class, on a directory that every node shares.

        With `path`, on an existing directory, which is left as it is.
        """
        if path is None:
            path = self._layout.root / "volumes" / name
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o777)
        spec = {
            "capacity": {"storage": size},
            "accessModes": [mode],
            "storageClassName": name,
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(path)},
        }
        made = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
        self.kubectl("apply", "-f", "-", input=json.dumps(made))
        return path

    def stop_api(self, *, freeze: bool = False) -> None:
        """Stop the API server; with `freeze`, it accepts connections but never answers."""
        if freeze:
            self._process("kube-apiserver").send(signal.SIGSTOP)
        else:
            self._ledger.kill("kube-apiserver")

    def start_api(self) -> None:
        """Undo `stop_api`, and wait until the API server answers."""
        process = self._ledger.find("kube-apiserver")
        if process and process.alive:
            process.send(signal.SIGCONT)
            self._control.wait_api()
        else:
            self._control.start_api()

    @contextmanager
    def patient(self, seconds: int) -> Iterator[None]:
        """Mark nodes as not ready only after so many seconds, because a thousand nodes report seldom."""
        self._ledger.kill("kube-controller-manager")
        self._control.start_manager(missed_after=seconds)
        yield
        self._ledger.kill("kube-controller-manager")
        self._control.start_manager()

    def compact(self) -> None:
        """Compact the history: a watch from an older version gets 410 Gone.

        The API server keeps recent changes in memory, so it is restarted as well.
        """
        self.stop_api()
        self._control.compact()
        self._control.start_api()

    def lose_node(self, name: str) -> None:
        self._node(name).lose()

    def orphan_node(self, name: str) -> None:
        """End the node's agents; its pods continue."""
        self._node(name).orphan()

    def restore_node(self, name: str) -> None:
        """Start the node's agents again, and wait until it is Ready."""
        node = self._node(name)
        node.start()
        node.wait()
        self._offer_gpus()

    def cut(self, address: str) -> None:
        """Drop all packets to and from the pod at this address, on open connections too."""
        network.cut(self._layout, address)

    def heal(self, address: str) -> None:
        network.heal(self._layout, address)

    def freeze(self, pod: str, container: str, namespace: str = "default") -> None:
        """Freeze every process of the container, as on a machine that hangs."""
        cgroups.freeze(self._container(pod, container, namespace), True, self._layout.cgroup)

    def thaw(self, pod: str, container: str, namespace: str = "default") -> None:
        cgroups.freeze(self._container(pod, container, namespace), False, self._layout.cgroup)

    @classmethod
    def _begin(cls, layout: Layout, nodes: int, owner: int | None) -> Cluster:
        machine.prepare()
        _check_free(layout)
        for name in CORE:
            binary(name)
        clean(layout)
        layout.root.mkdir(parents=True)
        cluster = cls(layout)
        if owner is not None:
            cluster._watch(owner)
        try:
            cluster._start(nodes)
        except BaseException:
            _keep_logs(layout)
            clean(layout)
            raise
        return cluster

    def _start(self, nodes: int) -> None:
        layout, parts = self._layout, [self._numbered(index + 1) for index in range(nodes)]
        network.setup(layout, [layout.control, layout.dns, *(node.address for node in parts)])
        authority = Authority(layout)
        self._control.certify(authority)
        where = registry.start(layout, self._ledger)
        self._ledger.note("registry", where)
        self._ledger.note("nodes", [node.name for node in parts])
        self._ledger.note("kubernetes", kubernetes_version())
        pause = push(where, "pause", Image({"pause": binary("pause")}, entrypoint=("/pause",)))
        self._ledger.note("images", {"pause": pause, "busybox": push(where, "busybox", busybox())})
        self._control.start()
        self._helper("connect")
        for node in parts:
            node.certify(authority)
            node.configure(where, pause)
            node.start()
        for node in parts:
            node.wait()
        self._offer_gpus()
        until(self._has_default_account, "the service account of the namespace default")
        self._ledger.note("whole", sorted(self._ledger.all()))

    def _offer_gpus(self) -> None:
        if len(self.nodes) > 1:
            self._node(self.nodes[1]).resource(GPU, 4)

    def _has_default_account(self) -> bool:
        return self.api.raw("GET", "/api/v1/namespaces/default/serviceaccounts/default")[0] == 200

    def _helper(self, verb: str) -> None:
        argv = [sys.executable, "-m", "harness", verb, str(self._layout.slot)]
        self._ledger.start(verb, argv, env={"PYTHONPATH": str(_HERE)})

    def _watch(self, owner: int) -> None:
        """Start a process that ends the cluster when its owner has ended."""
        process = Process.of(owner)
        if process is None:
            raise HarnessError(f"no process {owner} to watch")
        told = (self._layout.slot, process.pid, process.start)
        argv = [sys.executable, "-m", "harness", "watch", *map(str, told)]
        self._ledger.note("owner", [process.pid, process.start])
        # Neither recorded nor marked: it must survive the cleanup that it starts.
        subprocess.Popen(
            argv,
            env={**os.environ, "PYTHONPATH": str(_HERE)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ).returncode = 0

    def _numbered(self, index: int) -> Node:
        return Node(self._layout, self._ledger, index)

    def _node(self, name: str) -> Node:
        if name not in self.nodes:
            raise HarnessError(f"no node called {name}; there are {', '.join(self.nodes)}")
        return self._numbered(self.nodes.index(name) + 1)

    def _process(self, name: str) -> Process:
        process = self._ledger.find(name)
        if process is None or not process.alive:
            raise HarnessError(f"{name} is not running")
        return process

    def _container(self, pod: str, container: str, namespace: str) -> str:
        status = self.api("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}")["status"]
        every = [*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])]
        for each in every:
            if each["name"] == container and each.get("containerID"):
                return str(each["containerID"]).removeprefix("containerd://")
        raise HarnessError(f"pod {pod} has no running container {container}: {json.dumps(every)}")


def _check_free(layout: Layout) -> None:
    """Refuse to replace a cluster that another running program owns."""
    noted = Ledger(layout.state, layout.logs).read().get("owner")
    if isinstance(noted, list) and noted[0] != os.getpid() and Process(*noted).alive:
        raise HarnessError(
            f"process {noted[0]} runs a cluster of its own in slot {layout.slot}; "
            "wait for it, or set STOKER_CLUSTER_SLOT to a number from 1 to 9"
        )


def _keep_logs(layout: Layout) -> None:
    """Keep the logs of a cluster that did not start."""
    kept = layout.root.with_name(f"{layout.root.name}-failed-logs")
    shutil.rmtree(kept, ignore_errors=True)
    if layout.logs.exists():
        shutil.copytree(layout.logs, kept)
        print(f"the logs of the cluster that did not start are in {kept}", file=sys.stderr)
