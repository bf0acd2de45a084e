"""The volumes of a pod, and which containers mount them. Pure.

The courier's key is mounted only in the courier, the user's secrets only in main, the task's identity only in init.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.engine.base import Attempt, TaskPlan
from stoker.engine.kubernetes import names
from stoker.engine.kubernetes.config import ClusterConfig
from stoker.engine.kubernetes.manifests import scheduling, security_context
from stoker.spec import Job
from stoker.task import container_layout, layout
from stoker.task.layout import SharedPart

Object = dict[str, Any]

INPUTS = "/stoker/inputs"
ORDER = "/stoker/order"
TASK_JSON = f"{ORDER}/task.json"
_BUNDLE = "/stoker/bundle"


@dataclass(frozen=True)
class SharedClaim:
    """The shared claim for checkpoints, from the view of one pod."""

    home: str
    part: SharedPart
    wide: bool
    """Whether init and courier see the checkpoints of all runs of this home. Not if they run in an image that the user
    chose: the user could read them."""

    @property
    def where(self) -> str:
        """This pod's part, for init and courier."""
        return f"{container_layout.SHARED}/{self.part.name}"

    def own(self) -> list[Object]:
        """The mounts of its own part, in its task directory."""
        return [
            {
                "name": "checkpoints",
                "mountPath": f"{container_layout.TASK}/{name}",
                "subPath": f"stoker/{self.home}/{self.part.name}/{name}",
            }
            for name in layout.LASTING
        ]

    def around(self) -> Object:
        """The mount that contains other parts, to create its own, to read a lost one, to remove one. Not for `main`."""
        below = "" if self.wide else f"/{self.part.run}"
        return {
            "name": "checkpoints",
            "mountPath": f"{container_layout.SHARED}{below}",
            "subPath": f"stoker/{self.home}{below}",
        }


def secret_key(name: str) -> str:
    """The key of a user's secret in the attempt's Secret."""
    return f"secret.{name}"


def task_key(plan: TaskPlan) -> str:
    return f"task.{plan.name}.{plan.incarnation}.json"


def claim_of(uri: str) -> tuple[str, str]:
    """`pvc://claim/path` as (claim, path)."""
    claim, _, path = uri.removeprefix("pvc://").partition("/")
    return claim, path.strip("/")


def of_pod(attempt: Attempt, plan: TaskPlan, job: Job, config: ClusterConfig, bundle: str) -> list[Object]:
    found: list[Object] = [_empty("home"), _shm(job)]
    if config.read_only_root:
        found.append(_empty("tmp"))
    if job.launcher != "none":
        found += [_empty("task"), _empty("bin"), _empty("setup")]
        found += _secrets(
            attempt, plan, security_context.secret_mode(security_context.user_of(attempt.image, config))
        )
        if not config.stoker_image:
            found.append({"name": "bundle", "configMap": {"name": names.bundle_name(bundle)}})
        if config.checkpoints:
            found.append(_claim("checkpoints", {"claimName": config.checkpoints}))
    for number, (_, uri) in enumerate(_claims(job)):
        found.append(_claim(f"input-{number}", {"claimName": claim_of(uri)[0], "readOnly": True}))
    for number, (_, source) in enumerate(job.mounts.items()):
        name = f"mount-{number}"
        if source.startswith("pvc://"):
            found.append(_claim(name, {"claimName": claim_of(source.removesuffix(":ro"))[0]}))
        else:
            found.append(_empty(name))
    return found


def of_init(config: ClusterConfig, shared: SharedClaim | None) -> list[Object]:
    found = [
        _mount("task", container_layout.TASK),
        _mount("bin", container_layout.BIN),
        _mount("order", ORDER, write=False),
    ]
    if not config.stoker_image:
        found.append(_mount("bundle", _BUNDLE, write=False))
    return [*found, shared.around()] if shared else found


def of_courier(shared: SharedClaim | None) -> list[Object]:
    found = [
        _mount("task", container_layout.TASK),
        _mount("bin", container_layout.BIN, write=False),
        _mount("key", container_layout.KEY, write=False),
    ]
    return [*found, *shared.own(), shared.around()] if shared else found


def of_main(attempt: Attempt, job: Job, config: ClusterConfig, shared: SharedClaim | None) -> list[Object]:
    found = [_mount("home", container_layout.HOME), _mount("shm", "/dev/shm")]
    if config.read_only_root:
        found.append(_mount("tmp", "/tmp"))
    if job.launcher != "none":
        found += [
            _mount("task", container_layout.TASK),
            _mount("bin", container_layout.BIN, write=False),
            _mount("setup", container_layout.SETUPS),
        ]
        if attempt.secrets:
            found.append(_mount("secrets", container_layout.SECRETS, write=False))
        found += shared.own() if shared else []
    for number, (name, uri) in enumerate(_claims(job)):
        mount = _mount(f"input-{number}", f"{INPUTS}/{name}", write=False)
        if path := claim_of(uri)[1]:
            mount["subPath"] = path
        found.append(mount)
    for number, (where, source) in enumerate(job.mounts.items()):
        mount = _mount(f"mount-{number}", where, write=not source.endswith(":ro"))
        if source.startswith("pvc://") and (path := claim_of(source.removesuffix(":ro"))[1]):
            mount["subPath"] = path
        found.append(mount)
    return found


def _claims(job: Job) -> list[tuple[str, str]]:
    return [(name, uri) for name, uri in job.inputs.items() if uri.startswith("pvc://")]


def _secrets(attempt: Attempt, plan: TaskPlan, mode: int) -> list[Object]:
    name = names.secret_name(attempt.run, attempt.number)
    parts = {
        "key": {key: key for key in ("courier.key", "tls.crt", "tls.key")},
        "order": {task_key(plan): "task.json"},
        "secrets": {secret_key(one): one for one in attempt.secrets},
    }
    return [
        {
            "name": volume,
            "secret": {
                "secretName": name,
                "defaultMode": mode,
                "items": [{"key": key, "path": path} for key, path in items.items()],
            },
        }
        for volume, items in parts.items()
        if items
    ]


def _shm(job: Job) -> Object:
    """The runtime's default of 64 MiB is too small for data loaders. Its content counts as the task's memory."""
    medium: Object = {"medium": "Memory"}
    if job.resources.shm is not None:
        medium["sizeLimit"] = scheduling.amount(job.resources.shm)
    return {"name": "shm", "emptyDir": medium}


def _claim(name: str, claim: Object) -> Object:
    return {"name": name, "persistentVolumeClaim": claim}


def _empty(name: str) -> Object:
    return {"name": name, "emptyDir": {}}


def _mount(name: str, path: str, *, write: bool = True) -> Object:
    found: Object = {"name": name, "mountPath": path}
    if not write:
        found["readOnly"] = True
    return found
