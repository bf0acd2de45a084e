"""Fault injection into a task's pod, and the command that opens a shell in one."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from typing import Any

from stoker.engine.kubernetes.api.errors import KubeError
from stoker.engine.kubernetes.cluster import Cluster
from stoker.engine.kubernetes.config import IN_CLUSTER, ClusterConfig
from stoker.engine.kubernetes.manifests.template import MAIN
from stoker.errors import EngineError, NotFound
from stoker.task import container_layout
from stoker.task.directory import TaskDir
from stoker.task.formats import Order

Object = Mapping[str, Any]


async def hurt(cluster: Cluster, pod: Object, directory: TaskDir | None, how: str) -> str:
    """`launcher`: it is init of its container and no process inside can kill it, so it is told to end as if killed."""
    name = pod["metadata"]["name"]
    if how in ("launcher", "pod"):
        await asyncio.to_thread(_kill_launcher, name, directory)
        return f"killed the launcher of pod {name}"
    if how != "process":
        raise EngineError(f"cannot hurt a task by {how!r}", hint="Choices: process, launcher, pod.")
    status = directory.status() if directory is not None else None
    if status is None or not status.pid or status.phase not in ("running", "stopping", "setup"):
        raise NotFound(f"pod {name} has no training process")
    ended = None
    for argv in (["/bin/sh", "-c", 'kill -9 "$1"', "kill", str(status.pid)], ["kill", "-9", str(status.pid)]):
        try:
            ended = await cluster.kube.exec(cluster.namespace, name, MAIN, argv)
        except KubeError as exc:
            raise EngineError(f"cannot get into pod {name}: {exc.message}", hint=exc.hint) from exc
        if ended.code == 0:
            return f"killed process {status.pid} in pod {name}"
    words = (ended.stderr if ended else b"").decode(errors="replace").strip()
    raise EngineError(f"process {status.pid} in pod {name} cannot be killed: {words}")


def _kill_launcher(name: str, directory: TaskDir | None) -> None:
    order = directory.order() if directory is not None else None
    if directory is None or order is None:
        raise NotFound(f"pod {name} has no training process")
    directory.write_order(Order(seq=order.seq + 1, generation=order.generation, verb="die"))


def shell(config: ClusterConfig, pod: Object) -> dict[str, Any]:
    """`kubectl exec`, which handles the terminal."""
    metadata = pod["metadata"]
    argv = [shutil.which("kubectl") or "kubectl"]
    if config.kubeconfig and config.kubeconfig != IN_CLUSTER:
        argv += ["--kubeconfig", config.kubeconfig]
    if config.context:
        argv += ["--context", config.context]
    argv += ["--namespace", metadata["namespace"], "exec", "-it", metadata["name"], "--container", MAIN, "--"]
    return {"argv": argv + container_layout.command(container_layout.CURRENT, "shell", container_layout.TASK)}
