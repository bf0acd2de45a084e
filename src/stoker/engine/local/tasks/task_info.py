"""task.json of each task of an attempt. Pure."""

from __future__ import annotations

from dataclasses import replace

from stoker.engine.base import Attempt, TaskPlan
from stoker.engine.local.host.isolation import Isolation
from stoker.task.formats import TaskInfo

DEFAULT_PIDS = 4096
"""The default number of processes and threads of a task: enough for data loaders, too few to harm a machine."""


def render(attempt: Attempt, isolation: Isolation) -> list[TaskInfo]:
    """task.json of every task, in order. Pure."""
    return [_info(attempt, plan, isolation) for plan in attempt.tasks]


def group_name(run: str, attempt: int, task: str) -> str:
    """The name of a task's cgroup."""
    return f"{run}.{attempt}.{task}"


def _info(attempt: Attempt, plan: TaskPlan, isolation: Isolation) -> TaskInfo:
    tree = isolation.tree
    return replace(
        attempt.info(plan),
        pids=DEFAULT_PIDS if plan.pids is None else plan.pids,
        cgroup=None if tree is None else tree.record(group_name(attempt.run, attempt.number, plan.name)),
        pid_namespace=isolation.pid_namespace,
        near=True,
    )
