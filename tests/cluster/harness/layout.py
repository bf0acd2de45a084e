"""The paths, names and addresses of a cluster.

A machine can hold several clusters, one per slot; each has its own addresses, names and files.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import HarnessError

__all__ = ["DEFAULT_VERSION", "Layout", "cache", "kubernetes_version", "locked"]

DEFAULT_VERSION = "1.37.1"
_OF_MINOR = {"1.37": DEFAULT_VERSION, "1.29": "1.29.15"}


def kubernetes_version() -> str:
    """STOKER_TEST_KUBERNETES, complete (1.29.15) or short (1.29); the newest version otherwise."""
    named = os.environ.get("STOKER_TEST_KUBERNETES") or DEFAULT_VERSION
    return _OF_MINOR.get(named, named)


def cache() -> Path:
    """Binaries and running clusters: outside the checkout, so that a fresh clone reuses them."""
    if named := os.environ.get("STOKER_CLUSTER_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stoker-cluster"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """An exclusive file lock; waits for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _default_slot() -> int:
    return int(os.environ.get("STOKER_CLUSTER_SLOT") or 0)


@dataclass(frozen=True)
class Layout:
    slot: int = field(default_factory=_default_slot)
    """0 to 9; STOKER_CLUSTER_SLOT, or 0."""

    @property
    def root(self) -> Path:
        path = cache() / ("run" if self.slot == 0 else f"run-{self.slot}")
        if len(str(path)) > 60:
            raise HarnessError(
                f"{path} is too long for the sockets below it; set STOKER_CLUSTER_CACHE to a shorter path"
            )
        return path

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def lock(self) -> Path:
        """The lock that is held while the cluster is started or ended."""
        return self.root.with_name(f"{self.root.name}.lock")

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def pki(self) -> Path:
        return self.root / "pki"

    @property
    def link(self) -> str:
        """The interface with the cluster's addresses."""
        return f"stoker{self.slot}"

    @property
    def table(self) -> str:
        """The nft table with the cluster's own rules."""
        return f"stoker{self.slot}"

    @property
    def policies_table(self) -> str:
        """The nft table made of the NetworkPolicies."""
        return f"stoker{self.slot}-policies"

    @property
    def services_table(self) -> str:
        """The nft table made of the Services."""
        return f"stoker{self.slot}-services"

    @property
    def tables(self) -> tuple[str, ...]:
        return (self.table, self.policies_table, self.services_table)

    @property
    def cgroup(self) -> str:
        """The cgroup above all pods, without the leading slash."""
        return f"stoker-cluster-{self.slot}"

    @property
    def network(self) -> str:
        """Every address of the cluster except those of Services."""
        return f"{self._prefix}.0.0/17"

    @property
    def services(self) -> str:
        return f"{self._prefix}.128.0/20"

    @property
    def first_service(self) -> str:
        """The address of the service `kubernetes`."""
        return f"{self._prefix}.128.1"

    @property
    def control(self) -> str:
        """The address of etcd and the API server."""
        return f"{self._prefix}.0.1"

    @property
    def dns(self) -> str:
        return f"{self._prefix}.0.53"

    def node_address(self, index: int) -> str:
        return f"{self._prefix}.0.{10 + index}"

    def pods(self, index: int) -> str:
        return f"{self._prefix}.{index}.0/24"

    @property
    def server(self) -> str:
        return f"https://{self.control}:6443"

    @property
    def _prefix(self) -> str:
        return f"10.{189 + self.slot}"
