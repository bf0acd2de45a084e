"""What the engine is asked for: an attempt and its tasks, made from a run and its places. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stoker.control.startup.orders import image_of
from stoker.control.state import LiveTask
from stoker.engine.base import Attempt, TaskPlan
from stoker.settings import Settings
from stoker.spec import Job
from stoker.store.rows import RunRow


def attempt_of(
    run: RunRow,
    job: Job,
    number: int,
    plans: Sequence[TaskPlan],
    secrets: Mapping[str, str],
) -> Attempt:
    return Attempt(
        run=run.id,
        number=number,
        tasks=tuple(plans),
        job=job,
        secrets=dict(secrets),
        image=run.record.get("image") or {},
        labels={"name": run.name, "project": run.project, "user": run.user},
    )


def plan_of(run: RunRow, task: LiveTask, node: str, settings: Settings) -> TaskPlan:
    """`node`: the engine's own name of the node."""
    resources = task.part.job.resources
    return TaskPlan(
        name=task.name,
        role=task.part.role,
        index=task.index,
        incarnation=task.incarnation,
        node=node,
        cpu=resources.cpu,
        memory=resources.memory,
        gpus=task.place.gpus,
        log_budget=settings.logs.budget,
        log_segment=settings.logs.segment,
        job=task.part.job,
        image=image_of(run, task.part),
        given_up=task.replaced_silent,
        started=task.had_order,
    )
