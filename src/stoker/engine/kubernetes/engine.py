"""The Kubernetes engine: tasks are pods of a cluster, reached through their couriers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

from stoker.engine.base import Attempt, Handle, Needs, Node, Observation, Surroundings
from stoker.engine.change_feed import ChangeFeed, Key
from stoker.engine.kubernetes import capacity, fault_injection, job_validation, names, preflight
from stoker.engine.kubernetes.api import kinds
from stoker.engine.kubernetes.api.informer import Change
from stoker.engine.kubernetes.cluster import Cluster
from stoker.engine.kubernetes.config import ClusterConfig
from stoker.engine.kubernetes.courier_client.connections import Connections, NoAddress
from stoker.engine.kubernetes.lifecycle import resize as resizing
from stoker.engine.kubernetes.lifecycle.create import Submitter, incarnations
from stoker.engine.kubernetes.lifecycle.delete import Deleter
from stoker.engine.kubernetes.lifecycle.launcherless import LauncherlessTasks, is_launcherless
from stoker.engine.kubernetes.manifests import pod as render
from stoker.engine.kubernetes.manifests import scheduling, volumes
from stoker.engine.kubernetes.status import observe as observing
from stoker.engine.kubernetes.status import pod_causes
from stoker.errors import Conflict, EngineError, EngineUnavailable, NotFound
from stoker.settings import Settings
from stoker.spec import Job
from stoker.task import container_layout
from stoker.task.directory import TaskDir

log = logging.getLogger(__name__)

_PORT = 29400
"""The first of the ports through which the tasks of a run reach each other, each at its own address."""
Object = dict[str, Any]

RETRY = 10.0
"""Seconds between tries to create pods that the cluster refused for now."""
_REMEMBERED = 2000
"""How many deleted pods are remembered with their last state, and how many removed attempts."""


class KubernetesEngine:
    """Implements Engine, Watches, Drills, Resizes and Shows. One per cluster and server; used from one event loop.

    What the next server needs is in the cluster: labels say which attempt an object belongs to, and the Secret of an
    attempt lists the pods that were created. Only connections to couriers and the last state of deleted pods are in
    memory.
    """

    def __init__(self, name: str, config: ClusterConfig, settings: Settings) -> None:
        self.name = name
        self.config = config
        self.settings = settings
        self._parts: _Parts | None = None
        self._locks: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()
        self._feeds: set[ChangeFeed] = set()
        self._deleted_pods: dict[str, Object] = {}
        self._refusals: dict[Key, tuple[str, str]] = {}
        self._retries: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._retried_attempts: dict[tuple[str, int], Attempt] = {}
        """As last submitted, for attempts with pods that are being retried."""
        self._ended: set[tuple[str, int]] = set()
        self._removed: dict[tuple[str, int], None] = {}

    # -- pure ------------------------------------------------------------------------------------------------

    def needs(self, job: Job) -> Needs:
        return scheduling.needs(job, self.config, self.name)

    def refuse(self, job: Job) -> None:
        job_validation.refuse(job, self.config, self.name)

    def surroundings(self, job: Job) -> Surroundings:
        image = job.image or self.config.default_image
        return Surroundings(
            inherit=True, setups=container_layout.SETUPS, inputs=volumes.INPUTS, image=image, port=_PORT
        )

    def manifest(self, attempt: Attempt) -> str:
        origin = render.RunIdentity(
            names.home_id(self.settings.home), self.name, self.config.namespace, bundle="digest"
        )
        return render.to_yaml(render.render(attempt, self.config, render.PLACEHOLDERS, origin))

    # -- Engine ----------------------------------------------------------------------------------------------

    async def capacity(self) -> Sequence[Node]:
        cluster = (await self._ready()).cluster
        return capacity.nodes(
            self.name, self.config, cluster.nodes(), [*cluster.others(), *self._ending_pods(cluster)]
        )

    def _ending_pods(self, cluster: Cluster) -> list[Object]:
        """Pods that were told to end and still run: the scheduler has released them, but they still use their node."""
        found = [pod for pod in cluster.pods() if names.attempt_of(pod) in self._ended] if self._ended else []
        return [pod for pod in found if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")]

    async def submit(self, attempt: Attempt) -> Handle:
        names.checked(attempt.run, *(plan.name for plan in attempt.tasks))
        key = attempt.run, attempt.number
        parts = await self._ready()
        async with self._lock(*key):
            if key in self._removed:
                raise Conflict(f"attempt {attempt.number} of {attempt.run} was removed")
            await self._submit(parts, attempt)
        return self._handle(*key)

    async def observe(self) -> Sequence[Observation]:
        parts = await self._ready()
        cluster = parts.cluster
        secrets = cluster.secrets()
        there = {names.attempt_of(secret) for secret in secrets}
        return observing.observe(
            observing.ClusterObservation(
                cluster=self.name,
                config=self.config,
                secrets=secrets,
                pods=cluster.pods(),
                nodes=cluster.nodes(),
                events=cluster.events,
                contact=parts.connections.contact,
                deleted_pods=self._deleted_pods,
                ended=frozenset(self._ended),
                refusals=self._refusals,
                without_secret=[
                    key for key in parts.connections.known() if key[:2] not in there and not self._busy(key)
                ],
            )
        )

    async def stop(self, handle: Handle, *, grace: timedelta, tasks: Sequence[str] = ()) -> None:
        key = _parsed(handle)
        parts = await self._ready()
        if not tasks:
            await self._cancel_retry(key)
        async with self._lock(*key):
            if not tasks:
                self._ended.add(key)
            for task in tasks:
                self._refusals.pop((*key, task), None)  # no further try
            await parts.deleter.stop(key, grace.total_seconds(), tasks)

    async def reach(self, handle: Handle, task: str) -> TaskDir:
        key = (*_parsed(handle), task)
        names.checked(key[0], task)
        parts = await self._ready()
        secret = parts.cluster.secret(names.secret_name(*key[:2]))
        made = incarnations(secret)[1].get(task) if secret is not None else None
        absent = NoAddress(str(parts.connections.path(key)))
        if secret is None or made is None:
            return parts.connections.directory(key) or parts.launcherless.directory(key) or absent
        pod = names.pod_name(*key, made[0])
        if is_launcherless(secret):
            stub = {"metadata": {"name": pod, "uid": made[1]}}
            known = parts.launcherless.directory(key)
            return known or parts.launcherless.take(key, stub, gone=parts.cluster.pod(pod) is None)
        return parts.connections.connect(key, pod, made[1], secret) or absent

    async def remove(self, handle: Handle) -> None:
        key = _parsed(handle)
        parts = await self._ready()
        await self._cancel_retry(key)
        async with self._lock(*key):
            await parts.deleter.remove(key)
            self._removed[key] = None
            while len(self._removed) > _REMEMBERED:
                del self._removed[next(iter(self._removed))]
            self._ended.discard(key)
            await parts.launcherless.drop(*key)
            await parts.connections.drop(*key)

    async def close(self) -> None:
        """Called when the server ends; pods continue."""
        for key in list(self._retries):
            await self._cancel_retry(key)
        if self._parts is not None:
            await self._parts.launcherless.close()
            await self._parts.connections.close()
            await self._parts.cluster.close()
            self._parts = None
        for reader in self._feeds:
            reader.close()

    # -- Watches, Drills, Resizes, Shows ---------------------------------------------------------------------

    async def changes(self) -> AsyncIterator[Key]:
        feed = ChangeFeed()
        self._feeds.add(feed)
        try:
            async for key in feed:
                yield key
        finally:
            self._feeds.discard(feed)

    async def hurt(self, handle: Handle, task: str, how: str) -> str:
        pod = await self._pod(handle, task)
        parts = await self._ready()
        directory = parts.connections.directory((*_parsed(handle), task))
        return await fault_injection.hurt(parts.cluster, pod, directory, how)

    async def resize(self, handle: Handle, task: str, *, cpu: float | None, memory: int | None) -> str | None:
        pod = await self._pod(handle, task)
        return await resizing.resize((await self._ready()).cluster, pod, cpu=cpu, memory=memory)

    async def check(self) -> Sequence[Mapping[str, Any]]:
        return await preflight.check(self.name, self.config, self._ready_cluster)

    async def shell(self, handle: Handle, task: str) -> Mapping[str, Any]:
        pod = await self._pod(handle, task)
        return fault_injection.shell(self.config, pod)

    async def _pod(self, handle: Handle, task: str) -> Object:
        """The newest pod of a task that has not ended."""
        key = (*_parsed(handle), task)
        parts = await self._ready()
        for pod in sorted(parts.cluster.pods(), key=names.incarnation_of, reverse=True):
            if names.key_of(pod) == key and not pod_causes.look(pod).proof:
                return pod
        raise NotFound(f"{task} of {key[0]} is not running")

    # -- what is known ---------------------------------------------------------------------------------------

    @property
    def calls(self) -> dict[str, int]:
        """How often the API server was called since this server started: `create pods` -> 12."""
        return self._parts.cluster.calls if self._parts is not None else {}

    async def _ready(self) -> _Parts:
        """Connected, with everything listed and all couriers connected. The next call retries after a failure."""
        if self._parts is None:
            home = await asyncio.to_thread(names.home_id, self.settings.home)
            if self._parts is None:
                self._parts = _Parts(self, home)
        parts = self._parts
        await parts.cluster.connect()
        if not parts.adopted:
            pods = parts.cluster.pods()
            parts.adopted = True
            for pod in pods:
                self._connect_pod(pod)
        return parts

    async def _ready_cluster(self) -> Cluster:
        return (await self._ready()).cluster

    def on_change(self, change: Change) -> None:
        """Something in the cluster changed. Called for every change, in the event loop."""
        if change.kind is kinds.PODS:
            self._on_pod_change(change)
        elif change.kind is kinds.SECRETS and not change.deleted:
            attempt = names.attempt_of(change.object)
            for pod in self._pods_of(attempt) if attempt is not None else ():
                self._connect_pod(pod)
        elif change.kind is kinds.SECRETS and (attempt := names.attempt_of(change.object)) is not None:
            self.notify((*attempt, ""))

    def _on_pod_change(self, change: Change) -> None:
        key = names.key_of(change.object)
        if key is None or (change.object["metadata"].get("labels") or {}).get(names.CLUSTER) != self.name:
            return
        if change.deleted:
            self._archive_pod(key, change.object)
        else:
            self._connect_pod(change.object)
        self.notify(key)

    def _archive_pod(self, key: Key, pod: Object) -> None:
        self._deleted_pods[str(pod["metadata"].get("uid"))] = pod
        while len(self._deleted_pods) > _REMEMBERED:
            del self._deleted_pods[next(iter(self._deleted_pods))]
        if self._parts is None:
            return
        if is_launcherless(pod):
            self._parts.launcherless.take(key, pod, gone=True)
        elif self._parts.connections.is_of(key, str(pod["metadata"].get("uid"))):
            self._parts.connections.pod_ended(key)

    def _connect_pod(self, pod: Object) -> None:
        """Keep a connection to a pod's courier while the pod exists."""
        key, parts = names.key_of(pod), self._parts
        if key is None or parts is None:
            return
        try:
            secret = parts.cluster.secret(names.secret_name(*key[:2]))
        except EngineUnavailable:
            parts.adopted = False  # its Secret is not known yet: the next `_ready` connects it
            return
        if secret is None or names.incarnation_of(pod) < incarnations(secret)[1].get(key[2], (0, ""))[0]:
            return
        metadata = pod["metadata"]
        if is_launcherless(pod):
            parts.launcherless.take(key, pod)
            return
        if parts.connections.connect(key, metadata["name"], metadata["uid"], secret) is None:
            return
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            parts.connections.pod_ended(key)
        elif pod_causes.courier_runs(pod):
            parts.connections.start_polling(key)

    def notify(self, key: Key) -> None:
        """Something about this task may have changed."""
        for reader in self._feeds:
            reader.put(key)
        if self._parts is not None:
            self._parts.deleter.wake(key[:2])

    def _pods_of(self, attempt: tuple[str, int]) -> list[Object]:
        if self._parts is None:
            return []
        try:
            return [pod for pod in self._parts.cluster.pods() if names.attempt_of(pod) == attempt]
        except EngineUnavailable:
            return []

    def _lock(self, run: str, attempt: int) -> asyncio.Lock:
        return self._locks.setdefault((run, attempt), asyncio.Lock())

    def _busy(self, key: Key) -> bool:
        """Whether the task's attempt is being created or removed at the moment."""
        lock = self._locks.get(key[:2])
        return lock is not None and lock.locked()

    def _handle(self, run: str, attempt: int) -> Handle:
        return {"engine": self.name, "run": run, "attempt": attempt}

    # -- pods that the cluster refused for now ---------------------------------------------------------------

    async def _submit(self, parts: _Parts, attempt: Attempt) -> None:
        key = attempt.run, attempt.number
        refusals = await parts.submitter.submit(attempt)
        for plan in attempt.tasks:
            self._refusals.pop((*key, plan.name), None)
        self._refusals.update({(*key, task): found for task, found in refusals.items()})
        for pod in self._pods_of(key):
            self._connect_pod(pod)
        if refusals:
            self._retried_attempts[key] = attempt
        if refusals and key not in self._retries:
            self._retries[key] = asyncio.create_task(self._retry(key))

    async def _retry(self, key: tuple[str, int]) -> None:
        """Try until all pods are created: others may end, and quotas may be raised. Meanwhile `why` has the reason."""
        try:
            while any(found[:2] == key for found in self._refusals):
                await asyncio.sleep(RETRY)
                try:
                    parts = await self._ready()
                    async with self._lock(*key):
                        await self._submit(parts, self._refused(self._retried_attempts[key]))
                except EngineError as exc:
                    log.info("attempt %d of %s is not taken yet: %s", key[1], key[0], exc)
        finally:
            self._retries.pop(key, None)
            self._retried_attempts.pop(key, None)

    def _refused(self, attempt: Attempt) -> Attempt:
        """The attempt with the refused tasks that are still wanted: some may have been stopped meanwhile."""
        key = attempt.run, attempt.number
        return replace(
            attempt, tasks=tuple(plan for plan in attempt.tasks if (*key, plan.name) in self._refusals)
        )

    async def _cancel_retry(self, key: tuple[str, int]) -> None:
        task = self._retries.pop(key, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for found in [found for found in self._refusals if found[:2] == key]:
            del self._refusals[found]


class _Parts:
    """What an engine has once its home's identity has been read."""

    def __init__(self, engine: KubernetesEngine, home: str) -> None:
        settings = engine.settings
        self.cluster = Cluster(engine.name, engine.config, home)
        self.cluster.listen(engine.on_change)
        self.connections = Connections(self.cluster, settings.home.mirrors / engine.name, engine.notify)
        self.launcherless = LauncherlessTasks(
            self.cluster, self.connections.path, settings.logs, engine.notify
        )
        self.submitter = Submitter(self.cluster, settings.home)
        self.deleter = Deleter(self.cluster, self.connections)
        self.adopted = False


def _parsed(handle: Handle) -> tuple[str, int]:
    try:
        run, attempt = str(handle["run"]), int(handle["attempt"])
    except (KeyError, TypeError, ValueError):
        raise EngineError(f"not a handle of this engine: {dict(handle)!r}") from None
    names.checked(run)
    return run, attempt
