"""The objects that are sent to a cluster for an attempt. Pure. `--dry-run` prints them.

An attempt is one Secret (identity, keys, the user's secrets) and one pod per task, owned by the Secret. In a pod:

    init      creates the task directory and unpacks Stoker's code; runs once
    courier   a sidecar that serves the task directory to the server; only this container has its key
    main      the user's image with the launcher in it; only this container has the user's secrets

Values reach programs as separate arguments and variables, never as part of a shell command.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from stoker.engine.base import Attempt, TaskPlan
from stoker.engine.kubernetes import names
from stoker.engine.kubernetes.config import ClusterConfig
from stoker.engine.kubernetes.manifests import scheduling, security_context, template, volumes
from stoker.errors import Refused
from stoker.spec import Job
from stoker.task import container_layout
from stoker.task.courier_protocol import PORT
from stoker.task.formats import TaskInfo
from stoker.task.layout import SharedPart

Object = dict[str, Any]

NOT_SHOWN = "(not shown)"
_NO_JOB = Job(name="task", run="true")
_NO_GPUS = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
"""Images made for GPUs request all of them by default; some runtimes would give GPUs to tasks that requested none."""


@dataclass(frozen=True)
class Keys:
    """The keys shared by the server and the courier. Stored in the Secret, and nowhere else in the cluster."""

    courier: bytes = field(repr=False)
    cert: bytes
    private: bytes = field(repr=False)


PLACEHOLDERS = Keys(*(text.encode() for text in (NOT_SHOWN, NOT_SHOWN, NOT_SHOWN)))


@dataclass(frozen=True)
class RunIdentity:
    """The server, cluster and bundle that an attempt's objects belong to."""

    home: str
    cluster: str
    namespace: str = ""
    """Empty: left to the client that sends it."""
    bundle: str = ""
    """Digest of Stoker's code, if it travels in a ConfigMap."""


def render(attempt: Attempt, config: ClusterConfig, keys: Keys, origin: RunIdentity) -> list[Object]:
    """The Secret, then the pods in the order of the tasks; owner references are added once the Secret exists."""
    return [secret(attempt, config, keys, origin), *pods(attempt, config, origin)]


def secret(attempt: Attempt, config: ClusterConfig, keys: Keys, origin: RunIdentity) -> Object:
    names.checked(attempt.run, *(plan.name for plan in attempt.tasks))
    job = attempt.job or _NO_JOB
    data: dict[str, bytes] = {}
    if job.launcher != "none":
        data = {"courier.key": keys.courier, "tls.crt": keys.cert, "tls.key": keys.private}
        data |= task_files(attempt)
    data |= {volumes.secret_key(name): value.encode() for name, value in attempt.secrets.items()}
    tasks = {plan.name: plan.incarnation for plan in attempt.tasks}
    annotations = {names.TASKS: json.dumps(tasks)}
    if job.launcher == "none":
        annotations[names.PLAIN] = "none"
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(
            names.secret_name(attempt.run, attempt.number), attempt, config, origin, {}, annotations
        ),
        "type": "Opaque",
        "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
    }


def task_files(attempt: Attempt) -> dict[str, bytes]:
    """task.json of every task, by its key in the Secret."""
    return {
        volumes.task_key(plan): json.dumps(
            _info(attempt.seen_by(plan), plan).to_json(), separators=(",", ":")
        ).encode()
        for plan in attempt.tasks
    }


def pods(attempt: Attempt, config: ClusterConfig, origin: RunIdentity) -> list[Object]:
    names.checked(attempt.run, *(plan.name for plan in attempt.tasks))
    return [_pod(_Task(attempt.seen_by(plan), plan, config, origin)) for plan in attempt.tasks]


def bundle(content: bytes, digest: str) -> Object:
    """Stoker's code for images without it. One per version and namespace; servers share it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": names.bundle_name(digest), "labels": {names.MANAGED: "stoker"}},
        "immutable": True,
        "binaryData": {"bundle.zip": base64.b64encode(content).decode()},
    }


def image_of(attempt: Attempt, config: ClusterConfig) -> str:
    job = attempt.job or _NO_JOB
    found = str(attempt.image.get("reference") or "") or job.image or config.default_image
    if not found:
        raise Refused(
            "no image is named for this cluster",
            hint="Write `image:` in the job, or let an admin set the cluster's `default_image`.",
        )
    return found


def to_yaml(objects: Sequence[Object]) -> str:
    """For people, and for `kubectl apply --dry-run=server -f -`. Values of Secrets are hidden."""
    shown = [_hidden(obj) if obj["kind"] == "Secret" else obj for obj in objects]
    dumped = [yaml.dump(obj, Dumper=_Dumper, sort_keys=False, width=110) for obj in shown]
    return "---\n".join(dumped)


class _Dumper(yaml.SafeDumper):
    """Without anchors, and with multi-line text as a block."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _hidden(obj: Object) -> Object:
    rest = {key: value for key, value in obj.items() if key != "data"}
    return rest | {"stringData": dict.fromkeys(obj["data"], NOT_SHOWN)}


# -- pods ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """Everything that one pod is rendered from."""

    attempt: Attempt
    plan: TaskPlan
    config: ClusterConfig
    origin: RunIdentity

    @property
    def job(self) -> Job:
        return self.attempt.job or _NO_JOB

    @property
    def launcherless(self) -> bool:
        return self.job.launcher == "none"

    @property
    def name(self) -> str:
        return names.pod_name(self.attempt.run, self.attempt.number, self.plan.name, self.plan.incarnation)

    @property
    def image(self) -> str:
        return image_of(self.attempt, self.config)

    @property
    def python(self) -> str | None:
        return _literal(self.job.python) if self.job.python else None

    @property
    def user(self) -> security_context.User:
        return security_context.user_of(self.attempt.image, self.config)

    @property
    def shared(self) -> volumes.SharedClaim | None:
        """Where its checkpoints are on the shared claim, if the cluster has one."""
        attempt, plan = self.attempt, self.plan
        part = SharedPart(attempt.run, attempt.number, plan.name, plan.incarnation)
        if not self.config.checkpoints:
            return None
        return volumes.SharedClaim(
            self.origin.home, part, wide=bool(self.config.stoker_image) or not self.job.image
        )


def _pod(task: _Task) -> Object:
    job, config = task.job, task.config
    spec: Object = {
        "restartPolicy": "Never" if task.launcherless else "OnFailure",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(job.grace + (0 if task.launcherless else config.carry)),
        "securityContext": security_context.of_pod(task.user, config),
        **scheduling.spec(task.attempt, task.plan, job, config),
    }
    if task.launcherless and job.timeout is not None:
        spec["activeDeadlineSeconds"] = math.ceil(job.timeout)  # otherwise the launcher enforces it
    if config.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in config.pull_secrets]
    if not task.launcherless:
        spec["initContainers"] = [_init(task), _courier(task)]
    spec["containers"] = [_main(task)]
    spec["volumes"] = volumes.of_pod(task.attempt, task.plan, job, config, task.origin.bundle)
    found: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": _pod_metadata(task), "spec": spec}
    if job.pod:
        found = template.merge(found, job.pod)
    return template.merge(found, config.pod) if config.pod else found


def _pod_metadata(task: _Task) -> Object:
    labels = {names.TASK: task.plan.name, names.INCARNATION: str(task.plan.incarnation)}
    annotations = {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
        "kubectl.kubernetes.io/default-container": template.MAIN,
    }
    if task.launcherless:
        annotations[names.PLAIN] = "none"
    return _metadata(task.name, task.attempt, task.config, task.origin, labels, annotations)


def _metadata(
    name: str,
    attempt: Attempt,
    config: ClusterConfig,
    origin: RunIdentity,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
) -> Object:
    found: Object = {"name": name}
    if origin.namespace:
        found["namespace"] = origin.namespace
    ours = names.labels(origin.home, origin.cluster, attempt.run, attempt.number)
    people = {
        f"{names.PREFIX}{key}": value
        for key in ("name", "project", "user")
        if (value := names.label_value(str(attempt.labels.get(key) or "")))
    }
    found["labels"] = {**config.labels, **people, **ours, **labels}
    found["annotations"] = {**config.annotations, **annotations}
    return found


def _init(task: _Task) -> Object:
    """It has main's resources: init containers run before main, so this costs nothing and init is as fast."""
    program = container_layout.IMAGE_BUNDLE if task.config.stoker_image else container_layout.BUNDLE
    part = [task.shared.where] if task.shared else []
    found = _ours(
        task, program, "init", volumes.TASK_JSON, container_layout.TASK, container_layout.BIN, *part
    )
    found["resources"] = scheduling.resources(task.plan, task.job, task.config, with_devices=False)
    found["volumeMounts"] = volumes.of_init(task.config, task.shared)
    return found


def _courier(task: _Task) -> Object:
    size = task.config.sidecar
    places = ["--directory", container_layout.TASK, "--key-dir", container_layout.KEY]
    if task.shared:
        places += ["--shared", container_layout.SHARED]
    return {
        **_ours(task, container_layout.CURRENT, "courier", *places),
        "restartPolicy": "Always",
        "ports": [{"name": "courier", "containerPort": PORT, "protocol": "TCP"}],
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": "courier", "scheme": "HTTPS"},
            # On an overloaded node it takes minutes to start; an early kill would only restart that.
            "initialDelaySeconds": 300,
            "periodSeconds": 30,
            "timeoutSeconds": 10,
            "failureThreshold": 4,
        },
        "resources": {
            "requests": scheduling.amounts(size.cpu, size.memory),
            "limits": scheduling.amounts(size.cpu_limit, size.memory),
        },
        "volumeMounts": volumes.of_courier(task.shared),
    }


def _ours(task: _Task, program: str, verb: str, *arguments: str) -> Object:
    """A container that runs Stoker's code: in Stoker's image if the cluster has one, else in the user's."""
    ours = task.config.stoker_image
    python = "python3" if ours else task.python
    return {
        "name": verb,
        "image": ours or task.image,
        "command": container_layout.command(program, verb, *arguments, python=python),
        "env": [_NO_GPUS],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": security_context.of_ours(task.config),
    }


def _main(task: _Task) -> Object:
    job, config, many = task.job, task.config, len(task.attempt.tasks)
    found: Object = {"name": template.MAIN, "image": task.image}
    if not task.launcherless:
        found["command"] = container_layout.command(
            container_layout.CURRENT, "launch", container_layout.TASK, python=task.python
        )
    elif job.argv():
        found["command"] = [_literal(word) for word in job.argv()]
    elif job.args:
        found["args"] = [_literal(word) for word in job.args]
    if env := _environment(task):
        found["env"] = env
    found |= {
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": scheduling.resources(task.plan, job, config, together=many > 1),
        "securityContext": security_context.of_main(config, scheduling.rdma(task.plan, job, config, many)),
        "volumeMounts": volumes.of_main(task.attempt, job, config, task.shared),
    }
    return found


def _environment(task: _Task) -> list[Object]:
    found: list[Object] = [] if scheduling.gpus(task.plan, task.job) else [_NO_GPUS]
    if not task.launcherless:
        return found  # the launcher sets the body's environment, from the order
    attempt, plan = task.attempt, task.plan
    inputs = {
        f"STOKER_INPUT_{name.upper().replace('-', '_')}": f"{volumes.INPUTS}/{name}"
        for name in task.job.inputs
    }
    whole = {
        "HOME": container_layout.HOME,
        **({"STOKER_INPUTS": volumes.INPUTS, **inputs} if inputs else {}),
        **task.job.env,
        "STOKER_RUN": attempt.run,
        "STOKER_ATTEMPT": str(attempt.number),
        "STOKER_ROLE": plan.role,
        "STOKER_TASK_INDEX": str(plan.index),
    }
    found += [{"name": name, "value": _literal(value)} for name, value in whole.items()]
    where = names.secret_name(attempt.run, attempt.number)
    for name in attempt.secrets:
        key = {"name": where, "key": volumes.secret_key(name)}
        found.append({"name": name, "valueFrom": {"secretKeyRef": key}})
    return found


def _literal(value: str) -> str:
    """Kubernetes replaces $(NAME) in commands and variables; `$$` is a literal dollar."""
    return value.replace("$", "$$")


def _info(attempt: Attempt, plan: TaskPlan) -> TaskInfo:
    job, image = attempt.job or _NO_JOB, attempt.image
    return replace(
        attempt.info(plan),
        gpus=None if scheduling.gpus(plan, job) else [],
        secrets_dir=container_layout.SECRETS if attempt.secrets else None,
        setups=container_layout.SETUPS,
        workdir=".",
        home=container_layout.HOME,
        command=[
            str(part) for part in [*(image.get("entrypoint") or ()), *(job.args or image.get("cmd") or ())]
        ],
        lease=job.lease,
        guards=True,
        exclusive=job.exclusive,
    )
