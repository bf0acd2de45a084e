"""The one kind of cluster. Its code is imported with the first cluster: few homes have one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.engine.base import Engine
from stoker.settings import Settings


class Kubernetes:
    """Implements control.clusters.Backend."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def make(self, name: str, config: Mapping[str, Any]) -> Engine:
        from stoker.engine.kubernetes.config import ClusterConfig
        from stoker.engine.kubernetes.engine import KubernetesEngine

        return KubernetesEngine(name, ClusterConfig.from_json(config), self._settings)

    def changed(self, config: Mapping[str, Any], changes: Sequence[str]) -> Mapping[str, Any]:
        from stoker.engine.kubernetes.config import ClusterConfig, changed

        return changed(ClusterConfig.from_json(config), changes).to_json()
