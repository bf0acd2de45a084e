"""The Kubernetes API as Stoker uses it: plain dicts over HTTP, and one list-and-watch cache. Nothing else in
Stoker talks to an API server.

`Kube` (client) sends requests with the credentials of a `KubeConfig`; `Cache` mirrors kinds of objects and says
when it cannot. `kinds` names the kinds. Importing this package is cheap; the HTTP library is loaded with the first
use of `Kube`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.engine.kubernetes.kube import kinds
from stoker.engine.kubernetes.kube.config import KubeConfig
from stoker.engine.kubernetes.kube.errors import KubeError, KubeUnavailable
from stoker.engine.kubernetes.kube.kinds import Kind

if TYPE_CHECKING:
    from stoker.engine.kubernetes.kube.cache import Cache, Change, Select
    from stoker.engine.kubernetes.kube.client import Kube
    from stoker.engine.kubernetes.kube.session import Answer
    from stoker.engine.kubernetes.kube.streams import Ended

__all__ = [
    "Answer",
    "Cache",
    "Change",
    "Ended",
    "Kind",
    "Kube",
    "KubeConfig",
    "KubeError",
    "KubeUnavailable",
    "Select",
    "kinds",
]

_HOMES = {
    "Answer": "session",
    "Cache": "cache",
    "Change": "cache",
    "Ended": "streams",
    "Kube": "client",
    "Select": "cache",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
