"""The Kubernetes API as Stoker uses it: plain dicts over HTTP, and one list-and-watch cache. Nothing else in
Stoker talks to an API server.

client       Kube: requests with the credentials of a KubeConfig
informer     Informer: a mirror of some kinds of objects, kept by list and watch; says when it cannot
kinds        the kinds by name
session      credentials, connections, bounded tries
streams      watches, logs, exec, port-forward
kubeconfig   which API server, with which credentials
credentials  tokens and certificates, as of now
exec_plugin  credentials from plugins
tls          whom to trust towards the API server
proxies      HTTP proxies, by the rules of curl and kubectl
errors       KubeError and KubeUnavailable

Importing this package is cheap; the HTTP library is loaded with the first use of `Kube`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.engine.kubernetes.api import kinds
from stoker.engine.kubernetes.api.errors import KubeError, KubeUnavailable
from stoker.engine.kubernetes.api.kinds import Kind
from stoker.engine.kubernetes.api.kubeconfig import KubeConfig

if TYPE_CHECKING:
    from stoker.engine.kubernetes.api.client import Kube
    from stoker.engine.kubernetes.api.informer import Change, Informer, Select
    from stoker.engine.kubernetes.api.session import Answer
    from stoker.engine.kubernetes.api.streams import Ended

__all__ = [
    "Answer",
    "Informer",
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
    "Informer": "informer",
    "Change": "informer",
    "Ended": "streams",
    "Kube": "client",
    "Select": "informer",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
