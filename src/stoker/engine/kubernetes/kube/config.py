"""Which API server, with which credentials: kubeconfig files, or what a pod finds in itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

IN_CLUSTER = "in-cluster"


@dataclass(frozen=True)
class KubeConfig:
    """Everything needed to talk to one cluster as one user. Holds credentials; its repr shows none."""

    server: str
    namespace: str = "default"
    context: str = ""

    @classmethod
    def load(
        cls, kubeconfig: str | Path = "", context: str = "", *, env: Mapping[str, str] | None = None
    ) -> KubeConfig:
        """`kubeconfig`: a path; "" for kubectl's own rules ($KUBECONFIG with several files merged, ~/.kube/config,
        and inside a pod without either its service account); "in-cluster" for the service account.
        `context`: "" for the current one. SpecError says what is wrong with which file."""
        raise NotImplementedError
