"""Creates an attempt's objects, each once: the Secret, then the pods, then an annotation that they were created.

After a crash at any point the same submit continues. Before the annotation no order can have been given, so an absent
pod may be created again. After it an absent pod must have existed, and no second pod of the same incarnation is
created. A task without a launcher needs no order: its pod is created only by the call that created the Secret.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stoker.engine.base import Attempt, TaskPlan
from stoker.engine.kubernetes import names
from stoker.engine.kubernetes.api import kinds
from stoker.engine.kubernetes.api.errors import KubeError
from stoker.engine.kubernetes.cluster import Cluster
from stoker.engine.kubernetes.manifests import credentials
from stoker.engine.kubernetes.manifests import pod as render
from stoker.engine.kubernetes.status import pod_causes
from stoker.errors import Conflict, EngineError
from stoker.settings import Home

log = logging.getLogger(__name__)

Object = dict[str, Any]

_TOGETHER = 16
"""Pods that are created at a time."""


class Submitter:
    """Belongs to one event loop. One submit per attempt at a time."""

    def __init__(self, cluster: Cluster, home: Home) -> None:
        self._cluster = cluster
        self._home = home
        self._bundle: asyncio.Task[str] | None = None

    async def submit(self, attempt: Attempt) -> Refusals:
        """Which tasks could not be created for now, and why. EngineError for those that never can be."""
        origin = await self._origin()
        config = self._cluster.config
        pods = render.pods(attempt, config, origin)  # before anything is created: this may refuse the attempt
        secret, fresh = await self._secret(attempt, origin)
        requested, created = incarnations(secret)
        wanted = [
            (plan, pod)
            for plan, pod in zip(attempt.tasks, pods, strict=True)
            if plan.incarnation > created.get(plan.name, (0, ""))[0]
        ]
        if not wanted:
            return {}
        newer = {
            plan.name: plan.incarnation
            for plan, _ in wanted
            if plan.incarnation > requested.get(plan.name, 0)
        }
        for plan, _ in wanted:
            await self._delete_predecessors(attempt, plan)
        if newer:
            secret = await self._add_tasks(attempt, secret, requested | newer)
        again = not fresh and (secret["metadata"].get("annotations") or {}).get(names.PLAIN) == "none"
        results = await self._create_pods(wanted, secret, again=again)
        refusals = {task: found for task, found in results.items() if isinstance(found, tuple)}
        uids = {
            plan.name: (plan.incarnation, str(results[plan.name]))
            for plan, _ in wanted
            if plan.name not in refusals
        }
        await self._annotate_created(secret, {**created, **uids})
        return refusals

    # -- the Secret ------------------------------------------------------------------------------------------

    async def _secret(self, attempt: Attempt, origin: render.RunIdentity) -> tuple[Object, bool]:
        """The attempt's Secret, and whether this call created it."""
        cluster, name = self._cluster, names.secret_name(attempt.run, attempt.number)
        if (found := cluster.secret(name)) is not None:
            return found, False
        fresh = await asyncio.to_thread(credentials.make)
        body = render.secret(attempt, cluster.config, fresh, origin)
        try:
            found = await cluster.kube.create(kinds.SECRETS, body)
        except KubeError as exc:
            if not exc.exists:
                raise EngineError(
                    f"the attempt's Secret cannot be created: {exc.message}", hint=exc.hint
                ) from exc
            found = await cluster.kube.get(kinds.SECRETS, name)
            _check_labels(found, body)
            return found, False
        cluster.note(kinds.SECRETS, found)
        return found, True

    async def _add_tasks(self, attempt: Attempt, secret: Object, requested: Mapping[str, int]) -> Object:
        """Add tasks of a higher incarnation: their identity must be in the Secret before their pod is created."""
        body = render.secret(attempt, self._cluster.config, render.PLACEHOLDERS, render.RunIdentity("", ""))
        data = {key: value for key, value in body["data"].items() if key.startswith("task.")}
        annotations = {names.TASKS: json.dumps(dict(requested))}
        return await self._patch(secret, {"metadata": {"annotations": annotations}, "data": data})

    async def _annotate_created(self, secret: Object, created: Mapping[str, tuple[int, str]]) -> None:
        text = json.dumps({task: list(found) for task, found in created.items()})
        await self._patch(secret, {"metadata": {"annotations": {names.SUBMITTED: text}}})

    async def _patch(self, secret: Object, patch: Object) -> Object:
        try:
            found = await self._cluster.kube.patch(kinds.SECRETS, secret["metadata"]["name"], patch)
        except KubeError as exc:
            raise EngineError(f"the attempt's Secret cannot be changed: {exc.message}") from exc
        self._cluster.note(kinds.SECRETS, found)
        return found

    # -- pods ------------------------------------------------------------------------------------------------

    async def _delete_predecessors(self, attempt: Attempt, plan: TaskPlan) -> None:
        """Delete pods of earlier incarnations, which must be proven dead."""
        for pod in self._cluster.pods():
            if names.key_of(pod) != (attempt.run, attempt.number, plan.name):
                continue
            if names.incarnation_of(pod) >= plan.incarnation:
                continue
            if not pod_causes.look(pod).proof and not plan.given_up:
                raise Conflict(
                    f"{plan.name} of {attempt.run} is still running at incarnation {names.incarnation_of(pod)}",
                    hint="Stop it first.",
                )
            await self._cluster.kube.delete(
                kinds.PODS, pod["metadata"]["name"], grace=1, uid=pod["metadata"]["uid"]
            )

    async def _create_pods(
        self, wanted: list[tuple[TaskPlan, Object]], secret: Object, *, again: bool
    ) -> dict[str, str | tuple[str, str]]:
        """By task: the pod's UID, or why there is none for now."""
        places = asyncio.Semaphore(_TOGETHER)

        async def one(plan: TaskPlan, pod: Object) -> str | tuple[str, str]:
            async with places:
                return await self._create_pod(_owned(pod, secret), again=again or plan.started)

        found = await asyncio.gather(*(one(*item) for item in wanted), return_exceptions=True)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return {plan.name: result for (plan, _), result in zip(wanted, found, strict=True)}  # type: ignore[misc]

    async def _create_pod(self, pod: Object, *, again: bool) -> str | tuple[str, str]:
        kube, name = self._cluster.kube, pod["metadata"]["name"]
        if again:
            try:
                found = await kube.get(kinds.PODS, name)
            except KubeError as exc:
                if exc.absent:
                    return ""  # it may have run, so it is not created again
                raise
            _check_labels(found, pod)
            return str(found["metadata"]["uid"])
        try:
            found = await kube.create(kinds.PODS, pod)
        except KubeError as exc:
            if exc.exists:
                found = await kube.get(kinds.PODS, name)
                _check_labels(found, pod)
                return str(found["metadata"]["uid"])
            text, hint = pod_causes.refused(exc.message, exc.status)
            if pod_causes.over_quota(exc.message):
                return text, hint
            raise EngineError(text, hint=hint, details={"status": exc.status, "reason": exc.reason}) from exc
        self._cluster.note(kinds.PODS, found)
        return str(found["metadata"]["uid"])

    # -- Stoker's code ---------------------------------------------------------------------------------------

    async def _origin(self) -> render.RunIdentity:
        cluster = self._cluster
        found = render.RunIdentity(cluster.home, cluster.name, cluster.namespace)
        return found if cluster.config.stoker_image else replace(found, bundle=await self._ensure_bundle())

    async def _ensure_bundle(self) -> str:
        """The digest of the bundle in the namespace. Created once per server; a failure is tried again."""
        task = self._bundle
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._bundle = asyncio.create_task(self._upload_bundle())
        return await asyncio.shield(task)

    async def _upload_bundle(self) -> str:
        path = self._home.engine / f"bundle-{self._cluster.name}.zip"
        digest = await make_bundle(path)
        content = await asyncio.to_thread(path.read_bytes)
        path.unlink(missing_ok=True)
        body = render.bundle(content, digest)
        try:
            await self._cluster.kube.create(kinds.CONFIGMAPS, body)
        except KubeError as exc:
            if not exc.exists:
                raise EngineError(f"Stoker's code cannot be brought to the cluster: {exc.message}") from exc
        return digest


Refusals = dict[str, tuple[str, str]]
"""By task: why the cluster refuses its pod for now, and a hint."""


def incarnations(secret: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, tuple[int, str]]]:
    """{task: incarnation} that were requested, and {task: (incarnation, pod's UID)} that were created."""
    annotations = secret["metadata"].get("annotations") or {}
    requested = {
        task: number
        for task, number in _parsed(annotations.get(names.TASKS)).items()
        if isinstance(number, int)
    }
    created = {
        task: (found[0], str(found[1]))
        for task, found in _parsed(annotations.get(names.SUBMITTED)).items()
        if isinstance(found, list) and len(found) == 2 and isinstance(found[0], int)
    }
    return requested, created


async def make_bundle(path: Any) -> str:
    """Bundle Stoker's code into one file; returns its digest. In a separate process: the launcher may not be
    imported here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "stoker.launcher.bundle",
        "--zip",
        str(path),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    if process.returncode != 0:
        raise EngineError(f"Stoker's code cannot be bundled: {err.decode(errors='replace').strip()[-500:]}")
    return out.decode().strip()


def _parsed(text: Any) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _owned(pod: Object, secret: Object) -> Object:
    """Owned by the Secret: deleting the Secret deletes the pod."""
    owner = {
        "apiVersion": "v1",
        "kind": "Secret",
        "name": secret["metadata"]["name"],
        "uid": secret["metadata"]["uid"],
    }
    return {**pod, "metadata": {**pod["metadata"], "ownerReferences": [owner]}}


def _check_labels(found: Object, wanted: Object) -> None:
    """An existing object of this name must be the wanted one."""
    there, ours = found["metadata"].get("labels") or {}, wanted["metadata"]["labels"]
    for label in (names.HOME, names.CLUSTER, names.RUN, names.ATTEMPT, names.TASK, names.INCARNATION):
        if there.get(label) != ours.get(label):
            raise EngineError(
                f"{found.get('kind', 'an object')} {found['metadata']['name']} already exists and belongs to another server",
                hint="Two servers share this namespace: give each its own with `stoker cluster set NAME namespace=...`.",
            )
