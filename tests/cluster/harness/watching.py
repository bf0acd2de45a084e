"""Lists of the cluster's objects that are kept up to date, for the harness's own controllers."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

from harness.api import Api

__all__ = ["Objects"]


class Objects:
    """The objects at each of `paths`, as of the last seen change; one thread per path follows it for ever."""

    def __init__(self, api: Api, paths: tuple[str, ...]) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._seen: dict[str, dict[str, Any] | None] = dict.fromkeys(paths)
        for path in paths:
            threading.Thread(target=self._follow, args=(path,), daemon=True).start()

    def wait(self) -> dict[str, list[Any]]:
        """Wait for a change and return the objects; a burst of changes counts as one."""
        while True:
            self._changed.wait()
            time.sleep(0.02)
            self._changed.clear()
            with self._lock:
                if all(found is not None for found in self._seen.values()):
                    return {path: list((found or {}).values()) for path, found in self._seen.items()}

    def _follow(self, path: str) -> None:
        while True:
            try:
                version = self._list(path)
                self._watch(path, version)
            except (OSError, ValueError, KeyError, http.client.HTTPException):
                # The API server is away, or no longer has the version: list again.
                time.sleep(0.5)

    def _list(self, path: str) -> str:
        status, said = self._api.raw("GET", path)
        if status != 200:
            raise ValueError(f"{status} for {path}")
        listed = json.loads(said)
        with self._lock:
            self._seen[path] = {each["metadata"]["uid"]: each for each in listed["items"]}
        self._changed.set()
        return str(listed["metadata"]["resourceVersion"])

    def _watch(self, path: str, version: str) -> None:
        for line in self._api.lines(f"{path}?watch=true&resourceVersion={version}"):
            event = json.loads(line)
            if event["type"] == "ERROR":
                return
            with self._lock:
                found = self._seen[path]
                assert found is not None
                if event["type"] == "DELETED":
                    found.pop(event["object"]["metadata"]["uid"], None)
                else:
                    found[event["object"]["metadata"]["uid"]] = event["object"]
            self._changed.set()
