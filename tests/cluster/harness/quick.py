"""Answers the most frequent kubectl commands of tests without kubectl: same arguments, same output.

Starting kubectl costs more CPU than its work, and tests call it often. Unknown commands still go to
kubectl.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from harness.api import Api
from harness.errors import HarnessError

__all__ = ["Quick"]

_CORE = "/api/v1"
_PLACES = {
    "pod": (_CORE, "pods", True),
    "node": (_CORE, "nodes", False),
    "secret": (_CORE, "secrets", True),
    "service": (_CORE, "services", True),
    "configmap": (_CORE, "configmaps", True),
    "namespace": (_CORE, "namespaces", False),
    "serviceaccount": (_CORE, "serviceaccounts", True),
    "event": (_CORE, "events", True),
    "resourcequota": (_CORE, "resourcequotas", True),
    "persistentvolume": (_CORE, "persistentvolumes", False),
    "persistentvolumeclaim": (_CORE, "persistentvolumeclaims", True),
    "job": ("/apis/batch/v1", "jobs", True),
    "deployment": ("/apis/apps/v1", "deployments", True),
    "networkpolicy": ("/apis/networking.k8s.io/v1", "networkpolicies", True),
}
"""The location of each kind: group and version, plural, whether it is in a namespace."""
_NAMES = {**{kind: kind for kind in _PLACES}, **{place[1]: kind for kind, place in _PLACES.items()}}
_GONE = ("--all", "--grace-period=1", "--ignore-not-found", "--timeout=60s")


@dataclass
class _Words:
    """The parsed arguments of a supported kubectl command."""

    plain: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    namespace: str = "default"
    selector: str = ""
    output: str = ""
    file: str = ""

    @classmethod
    def of(cls, argv: Sequence[str]) -> _Words:
        found = cls()
        names = {"-n": "namespace", "-l": "selector", "-o": "output", "-f": "file"}
        words = iter(argv)
        for word in words:
            if word in names:
                setattr(found, names[word], next(words))
            elif word.startswith("-"):
                found.flags.append(word)
            else:
                found.plain.append(word)
        return found


class Quick:
    """May be used from any thread."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def __call__(self, argv: Sequence[str], input: str | None) -> str | None:
        """The output of kubectl; None if the command is not supported. Raises where kubectl would fail."""
        words = _Words.of(argv)
        match words.plain:
            case ["get", kinds, *names] if len(names) <= 1 and words.output == "json" and not words.flags:
                return self._get(kinds, names, words)
            case ["create", "namespace", name] if not words.flags:
                self._ask("POST", f"{_CORE}/namespaces", {"metadata": {"name": name}})
                return f"namespace/{name} created\n"
            case ["delete", kind, *names] if kind in _NAMES and names and words.flags == ["--wait=false"]:
                for name in names:
                    self._ask("DELETE", self._place(kind, words.namespace, name))
                return "".join(f'{kind} "{name}" deleted\n' for name in names)
            case ["delete", "jobs,pods"] if tuple(words.flags) == _GONE and not words.selector:
                return self._empty(words.namespace)
            case ["label", "namespace", name, *labels] if labels and not words.flags:
                return self._label(name, labels)
            case ["apply"] if words.file == "-" and input and not words.flags:
                return self._apply(input, words.namespace)
        return None

    def _get(self, kinds: str, names: Sequence[str], words: _Words) -> str | None:
        if kinds not in _NAMES:
            return None
        path = self._place(kinds, words.namespace, *names)
        if words.selector:
            path += "?" + urlencode({"labelSelector": words.selector})
        return json.dumps(self._ask("GET", path))

    def _empty(self, namespace: str) -> str:
        for kind in ("job", "pod"):
            options = {"gracePeriodSeconds": 1, "propagationPolicy": "Background"}
            self._ask("DELETE", self._place(kind, namespace), options)
        deadline = time.monotonic() + 60
        while left := self._ask("GET", self._place("pod", namespace))["items"]:
            if time.monotonic() > deadline:
                raise HarnessError(f"timed out: {len(left)} pod(s) are left in {namespace}")
            time.sleep(0.2)
        return ""

    def _label(self, name: str, labels: Sequence[str]) -> str | None:
        if not all("=" in label for label in labels):
            return None
        values = dict(label.split("=", 1) for label in labels)
        patch = {"metadata": {"labels": values}}
        self._ask("PATCH", self._place("namespace", "", name), patch, "application/merge-patch+json")
        return f"namespace/{name} labeled\n"

    def _apply(self, input: str, namespace: str) -> str | None:
        try:
            given = json.loads(input)
        except ValueError:
            return None
        objects = given["items"] if given.get("kind") == "List" else [given]
        if not all(str(one.get("kind", "")).lower() in _PLACES for one in objects):
            return None
        said = []
        for one in objects:
            kind, meta = str(one["kind"]).lower(), one["metadata"]
            if "name" not in meta:
                return None
            path = self._place(kind, meta.get("namespace", namespace), meta["name"])
            query = "?fieldManager=kubectl&force=true"
            self._ask("PATCH", path + query, one, "application/apply-patch+yaml")
            said.append(f"{kind}/{meta['name']} serverside-applied\n")
        return "".join(said)

    def _place(self, kind: str, namespace: str, *names: str) -> str:
        group, plural, inside = _PLACES[_NAMES[kind]]
        parts = [group, "namespaces", namespace, plural] if inside else [group, plural]
        return "/".join([*parts, *(quote(name, safe="") for name in names)])

    def _ask(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Any:
        try:
            status, said = self._api.raw(method, path, body, kind)
        except (OSError, http.client.HTTPException) as exc:
            raise HarnessError(f"the API server does not answer {method} {path}: {exc}") from exc
        if 200 <= status < 300:
            return json.loads(said)
        try:
            found = json.loads(said)
            text = f"Error from server ({found.get('reason')}): {found.get('message')}"
        except ValueError:
            text = (
                f"the API server answers {status} to {method} {path}: {said[:1000].decode(errors='replace')}"
            )
        raise HarnessError(text)
