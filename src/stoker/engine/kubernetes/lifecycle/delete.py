"""Ends an attempt's pods, with proof, and deletes what is left of it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from stoker.engine.kubernetes import capacity, names
from stoker.engine.kubernetes.api import kinds
from stoker.engine.kubernetes.api.errors import KubeError
from stoker.engine.kubernetes.cluster import Cluster
from stoker.engine.kubernetes.courier_client.connections import Connections
from stoker.errors import Conflict, EngineError
from stoker.task.formats import Order

log = logging.getLogger(__name__)

Object = dict[str, Any]

MARGIN = 30.0
"""Seconds beyond the grace period that a cluster may take to end a pod."""
MIN_GRACE = 1
"""Seconds of grace. With 0 the API server removes a pod without knowing whether it ended: that is no proof."""
_CHECK_SECONDS = 2.0
"""Seconds between checks when no change is reported."""
_RELEASE_SECONDS = 10.0
"""Seconds that a courier may take to accept the order; its pod ends after its grace period anyway."""
_DELETE_SECONDS = 20.0
"""Seconds until deletions must be visible."""


class Deleter:
    """Belongs to one event loop."""

    def __init__(self, cluster: Cluster, connections: Connections) -> None:
        self._cluster = cluster
        self._connections = connections
        self._wakeups: dict[tuple[str, int], asyncio.Event] = {}

    def wake(self, key: tuple[str, int]) -> None:
        if key in self._wakeups:
            self._wakeups[key].set()

    async def stop(self, key: tuple[str, int], grace: float, tasks: Sequence[str] = ()) -> None:
        """End every pod of the attempt, or those that these tasks have now, and wait for their end. EngineError if
        an end cannot be proven."""
        deleted: set[str] = set()
        released: set[str] = set()
        until = time.monotonic() + grace + MARGIN
        # A task that is replaced meanwhile has a new pod, which is not to be ended.
        targets = {pod["metadata"]["uid"] for pod in self._running_pods(key) if _task(pod) in tasks}
        while living := [
            pod for pod in self._running_pods(key) if not tasks or pod["metadata"]["uid"] in targets
        ]:
            for pod in living:
                uid, idle = pod["metadata"]["uid"], self._idle(pod)
                if uid not in deleted:
                    deleted.add(uid)
                    await self._delete(pod, MIN_GRACE if idle else max(MIN_GRACE, math.ceil(grace)))
                elif idle and uid not in released:
                    released.add(uid)
                    await self._release(pod)
            self._refuse_unready_nodes(living)
            if time.monotonic() > until:
                stuck = living[0]["metadata"]["name"]
                raise EngineError(
                    f"pod {stuck} does not end", hint=f"`kubectl describe pod {stuck}` may say why."
                )
            await self._wait_for_change(key)

    async def remove(self, key: tuple[str, int]) -> None:
        """Delete what is left. Conflict while a pod still runs."""
        if living := self._running_pods(key):
            alive = ", ".join(sorted(_task(pod) for pod in living))
            raise Conflict(f"{key[0]} attempt {key[1]} still has {alive}", hint="Stop it first.")
        secret = self._cluster.secret(names.secret_name(*key))
        for pod in self._of(key):
            await self._delete(pod, MIN_GRACE)
        if secret is not None:
            try:
                await self._cluster.kube.delete(
                    kinds.SECRETS, secret["metadata"]["name"], uid=secret["metadata"]["uid"]
                )
            except KubeError as exc:
                raise EngineError(f"the attempt's Secret cannot be deleted: {exc.message}") from exc
        until = time.monotonic() + _DELETE_SECONDS
        while self._cluster.secret(names.secret_name(*key)) is not None or self._of(key):
            if time.monotonic() > until:
                raise EngineError(f"the objects of {key[0]} attempt {key[1]} are not deleted in time")
            await self._wait_for_change(key)

    # -- helpers ---------------------------------------------------------------------------------------------

    def _of(self, key: tuple[str, int]) -> list[Object]:
        return [pod for pod in self._cluster.pods() if names.attempt_of(pod) == key]

    def _running_pods(self, key: tuple[str, int]) -> list[Object]:
        """Pods that may still run; an ended pod is kept for its status."""
        return [
            pod
            for pod in self._of(key)
            if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
        ]

    def _idle(self, pod: Object) -> bool:
        """The launcher waits for an order or the body has ended: no grace is needed."""
        key = names.key_of(pod)
        directory = self._connections.directory(key) if key is not None else None
        status = directory.status() if directory is not None else None
        unplaced = not (pod.get("spec") or {}).get("nodeName")
        return unplaced or (status is not None and status.phase in ("ready", "ended"))

    async def _release(self, pod: Object) -> None:
        """Send `release` to a pod whose body has ended within the grace. The kubelet does not accept a shorter grace
        once it waits; the launcher ends when it is released."""
        key = names.key_of(pod)
        directory = self._connections.directory(key) if key is not None else None
        order = directory.order() if directory is not None else None
        if directory is None or order is None or order.verb == "release":
            return
        release = Order(seq=order.seq + 1, generation=order.generation, verb="release")
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                await asyncio.to_thread(directory.write_order, release)
        except (OSError, TimeoutError) as exc:
            log.info("%s: cannot be released: %s", pod["metadata"]["name"], exc)

    async def _delete(self, pod: Object, grace: int) -> None:
        try:
            await self._cluster.kube.delete(
                kinds.PODS, pod["metadata"]["name"], grace=grace, uid=pod["metadata"]["uid"]
            )
        except KubeError as exc:
            raise EngineError(f"pod {pod['metadata']['name']} cannot be deleted: {exc.message}") from exc

    def _refuse_unready_nodes(self, living: list[Object]) -> None:
        """A pod on a node that is not ready cannot be proven to end."""
        for pod in living:
            node = self._cluster.node(str((pod.get("spec") or {}).get("nodeName") or ""))
            if node is not None and not capacity.ready(node):
                name = node["metadata"]["name"]
                raise EngineError(
                    f"pod {pod['metadata']['name']} is on node {name}, which does not respond",
                    hint=f"It ends when {name} is back, or when {name} is deleted from the cluster.",
                )

    async def _wait_for_change(self, key: tuple[str, int]) -> None:
        event = self._wakeups.setdefault(key, asyncio.Event())
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            self._wakeups.pop(key, None)


def _task(pod: Object) -> str:
    found = names.key_of(pod)
    return found[2] if found is not None else str(pod["metadata"]["name"])
