"""How each key of Kubernetes and Kubeflow files is handled: one table, for the reader and for docs/foreign-files.md.

A scope is a kind of mapping: a pod's spec, a container, a run policy. The code reads the honoured keys; a test
compares it with this table. The words of the other rows are shown to the user.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Does(StrEnum):
    HONOURED = "honoured"
    HARMLESS = "harmless"
    """It makes no difference."""
    SAID = "said"
    """Done in another way; reported, not refused."""
    IGNORED = "ignored"
    """Cannot be honoured: refused without `--lenient`."""
    REFUSED = "refused"
    """Reaches beyond the pod: refused unless the cluster's admin allows it."""


@dataclass(frozen=True)
class Row:
    scope: str
    key: str
    does: Does
    words: str


SCOPES: dict[str, str] = {
    "document": "Every document",
    "metadata": "metadata",
    "pod": "A pod's spec (also of every template)",
    "container": "Its container",
    "security": "securityContext, of the pod and of the container",
    "volume": "volumes",
    "claim": "persistentVolumeClaim",
    "empty": "emptyDir",
    "mount": "volumeMounts",
    "env": "env",
    "secret": "secretKeyRef",
    "from": "envFrom",
    "job": "batch/v1 Job",
    "template": "template",
    "tfjob": "kubeflow.org/v1 TFJob",
    "pytorchjob": "kubeflow.org/v1 PyTorchJob",
    "jaxjob": "kubeflow.org/v1 JAXJob",
    "mpijob": "kubeflow.org/v1 and v2beta1 MPIJob",
    "replica": "A replica of these",
    "policy": "runPolicy",
    "scheduling": "schedulingPolicy",
    "elastic": "elasticPolicy",
    "trainjob": "trainer.kubeflow.org/v1alpha1 TrainJob",
    "runtime": "runtimeRef",
    "trainer": "trainer",
    "override": "podTemplateOverrides",
    "target": "targetJobs",
}

_HOOK = "Stoker starts and ends the process itself: SIGTERM, then the grace period"
_PROBE = "Stoker watches the process, its output and its metrics instead"
_HOST = "gives the pod a part of its host"
_PLACED = "travels to the cluster's pods; without a cluster it has no meaning"
_OWN_USER = "the cluster's admin decides as which user pods run"
_RENDEZVOUS = "Stoker brings the workers together"

_TABLE: dict[str, dict[Does, dict[str, str]]] = {
    "document": {
        Does.HONOURED: {
            "apiVersion": "with `kind`, names the kind of object",
            "kind": "with `apiVersion`, names the kind of object",
            "metadata": "see there",
            "spec": "see there",
            "items": "of a List: each is a job",
        },
        Does.HARMLESS: {"status": "its former state in a cluster"},
    },
    "metadata": {
        Does.HONOURED: {
            "name": "the run's name, shortened and simplified where necessary",
            "generateName": "the run's name; its id is unique anyway",
            "labels": "the run's tags, as `name=value`; of a template: also on its pods",
            "annotations": "of a template: on its pods",
        },
        Does.HARMLESS: dict.fromkeys(
            ("creationTimestamp", "resourceVersion", "uid", "generation", "managedFields", "selfLink"),
            "set by a cluster",
        ),
        Does.SAID: {"namespace": "runs go to the namespace that was configured for the cluster"},
        Does.IGNORED: {
            "finalizers": "no object of it stays in the cluster to wait for them",
            "ownerReferences": "no object in the cluster owns a run",
        },
    },
    "pod": {
        Does.HONOURED: {
            "containers": "one, which trains. Others are noted",
            "volumes": "see there",
            "restartPolicy": "with backoffLimit: `retries`",
            "terminationGracePeriodSeconds": "`grace`",
            "activeDeadlineSeconds": "`timeout`",
            "nodeSelector": _PLACED,
            "tolerations": _PLACED,
            "affinity": _PLACED,
            "topologySpreadConstraints": _PLACED,
            "imagePullSecrets": _PLACED,
            "hostAliases": _PLACED,
            "dnsConfig": _PLACED,
            "dnsPolicy": _PLACED,
            "securityContext": "see there",
            "serviceAccountName": "`default` only",
            "serviceAccount": "`default` only",
            "schedulerName": "`default-scheduler` only",
        },
        Does.HARMLESS: {
            "automountServiceAccountToken": "no token is mounted",
            "enableServiceLinks": "no such variables are set",
            "preemptionPolicy": "Stoker decides which run goes first",
        },
        Does.REFUSED: {
            "hostNetwork": _HOST,
            "hostPID": _HOST,
            "hostIPC": _HOST,
        },
        Does.IGNORED: {
            "initContainers": "only the training's own container runs; prepare with `setup`, or in the image",
            "ephemeralContainers": "only the training's own container runs",
            "priorityClassName": "Stoker has its own queue; `--set priority=high` goes first there",
            "priority": "Stoker has its own queue; `--set priority=high` goes first there",
            "runtimeClassName": "the cluster's admin decides which runtime pods have",
            "nodeName": "the scheduler chooses the node; use a nodeSelector",
            "hostname": "tasks know each other by address",
            "subdomain": "tasks know each other by address",
            "setHostnameAsFQDN": "tasks know each other by address",
            "shareProcessNamespace": "there is only one container",
            "readinessGates": _PROBE,
            "schedulingGates": "Stoker has its own queue",
            "overhead": "the cluster's admin decides which runtime pods have",
            "os": "tasks run on Linux",
            "hostUsers": _OWN_USER,
            "resourceClaims": "request GPUs by `nvidia.com/gpu`",
            "resources": "the container's resources count",
        },
    },
    "container": {
        Does.HONOURED: {
            "name": "names the one that trains, where there are several",
            "image": "`image`",
            "command": "`run`, with `args` after it; `$(NAME)` is filled in",
            "args": "after `command`; alone, the arguments of the image's own command",
            "workingDir": "the command changes to it first",
            "env": "see there",
            "envFrom": "see there",
            "resources": "`resources`; the request is also the limit",
            "volumeMounts": "see there",
            "ports": "with a `hostPort`: refused, unless the cluster's admin allows it",
            "securityContext": "see there",
            "imagePullPolicy": "IfNotPresent; others are reported",
        },
        Does.HARMLESS: {
            "terminationMessagePath": "last lines and exit code are kept anyway",
            "terminationMessagePolicy": "last lines and exit code are kept anyway",
            "stdin": "a run reads no terminal",
            "stdinOnce": "a run reads no terminal",
            "tty": "a run reads no terminal",
        },
        Does.IGNORED: {
            "lifecycle": _HOOK,
            "livenessProbe": _PROBE,
            "readinessProbe": _PROBE,
            "startupProbe": _PROBE,
            "volumeDevices": "tasks get no block devices",
            "resizePolicy": "`stoker resize` changes a run's size",
            "restartPolicy": "the run's own `retries` count",
        },
    },
    "security": {
        Does.HONOURED: {
            "privileged": "true: refused, unless the cluster's admin allows it",
            "allowPrivilegeEscalation": "true: refused, unless the cluster's admin allows it",
            "capabilities": "`drop` is done anyway; `add`: refused, unless the cluster's admin allows it",
        },
        Does.HARMLESS: {
            "runAsNonRoot": "pods run so anyway",
            "seccompProfile": "pods run with the runtime's default",
        },
        Does.IGNORED: {
            "runAsUser": _OWN_USER,
            "runAsGroup": _OWN_USER,
            "fsGroup": _OWN_USER,
            "fsGroupChangePolicy": _OWN_USER,
            "supplementalGroups": _OWN_USER,
            "supplementalGroupsPolicy": _OWN_USER,
            "readOnlyRootFilesystem": "`read_only_root` is a setting of the cluster",
            "sysctls": "pods run with the node's",
            "seLinuxOptions": "pods run with the node's",
            "seLinuxChangePolicy": "pods run with the node's",
            "appArmorProfile": "pods run with the runtime's default",
            "windowsOptions": "tasks run on Linux",
            "procMount": "pods run with the runtime's default",
        },
    },
    "volume": {
        Does.HONOURED: {
            "name": "its name in volumeMounts",
            "persistentVolumeClaim": "`mounts`; without a cluster `--volume CLAIM=PATH` names the folder",
            "emptyDir": "at /dev/shm in memory: `resources.shm`; else `mounts` of `empty`",
            "configMap": "travels to the cluster's pods; not available without a cluster",
            "downwardAPI": "travels to the cluster's pods; not available without a cluster",
            "ephemeral": "travels to the cluster's pods; not available without a cluster",
            "secret": "travels to the cluster's pods, if its admin allows `secrets`",
            "projected": "travels to the cluster's pods, if its admin allows `secrets`",
            "nfs": "travels to the cluster's pods, if its admin allows `spec.volumes.nfs`",
            "csi": "travels to the cluster's pods, if its admin allows `spec.volumes.csi`",
            "hostPath": "refused, unless the cluster's admin allows it",
        },
    },
    "claim": {Does.HONOURED: {"claimName": "its name", "readOnly": "`:ro`"}},
    "empty": {
        Does.HONOURED: {
            "medium": "Memory at /dev/shm; elsewhere reported",
            "sizeLimit": "at /dev/shm; elsewhere reported",
        },
    },
    "mount": {
        Does.HONOURED: {
            "name": "which volume",
            "mountPath": "where",
            "subPath": "which part of it",
            "readOnly": "`:ro`",
        },
        Does.HARMLESS: {"recursiveReadOnly": "see readOnly"},
        Does.IGNORED: {
            "subPathExpr": "variables are not filled in here; use subPath",
            "mountPropagation": "mounts stay in the pod",
        },
    },
    "env": {
        Does.HONOURED: {
            "name": "its name",
            "value": "its value; `$(NAME)` is filled in",
            "valueFrom": "secretKeyRef: a secret of the run, read at submit; the rest travels to the cluster's pods",
        },
    },
    "secret": {
        Does.HONOURED: {
            "name": "reported: its value is read at submit",
            "key": "reported: its value is read at submit",
        },
        Does.IGNORED: {"optional": "a secret of a run has a value"},
    },
    "from": {
        Does.HONOURED: {
            "configMapRef": "travels to the cluster's pods",
            "prefix": "travels with it",
        },
        Does.IGNORED: {
            "secretRef": "a run's secrets are named one by one; add `--secret NAME` for each that it needs",
        },
    },
    "template": {
        Does.HONOURED: {"metadata": "labels and annotations, on its pods", "spec": "see a pod's spec"},
    },
    "job": {
        Does.HONOURED: {
            "template": "see a pod's spec",
            "parallelism": "`workers`: as many as run at a time",
            "completions": "as many tasks; if more than run at a time, each worker runs its share one after the other",
            "completionMode": "sets JOB_COMPLETION_INDEX",
            "backoffLimit": "`retries`; default 6, as in Kubernetes",
            "activeDeadlineSeconds": "`timeout`, of each attempt",
            "suspend": "true is noted",
        },
        Does.HARMLESS: {
            "ttlSecondsAfterFinished": "pods are deleted when the run ends; the run's record stays",
            "manualSelector": "a run knows its own pods",
            "selector": "a run knows its own pods",
            "managedBy": "Stoker runs it",
            "podReplacementPolicy": "a lost task is replaced when it is proven gone",
        },
        Does.IGNORED: {
            "podFailurePolicy": "losses differ from failures by their cause, and cost no retry",
            "successPolicy": "a run is done when all its tasks are done",
            "backoffLimitPerIndex": "`retries` count for the whole run",
            "maxFailedIndexes": "a run fails with the first task that fails for good",
        },
    },
    "tfjob": {
        Does.HONOURED: {
            "tfReplicaSpecs": "Chief or Master, Worker, PS, Evaluator: `roles` and `workers`",
            "runPolicy": "see there",
            "successPolicy": "AllWorkers; without it and without a Chief the run still waits for all workers",
            "cleanPodPolicy": "see runPolicy",
            "backoffLimit": "see runPolicy",
            "activeDeadlineSeconds": "see runPolicy",
            "ttlSecondsAfterFinished": "see runPolicy",
        },
        Does.IGNORED: {"enableDynamicWorker": "the number of TensorFlow's workers is fixed"},
    },
    "pytorchjob": {
        Does.HONOURED: {
            "pytorchReplicaSpecs": "Master: a role, with rank 0; Worker: `workers`. The run is done when all are done",
            "runPolicy": "see there",
            "elasticPolicy": "see there",
            "nprocPerNode": "`processes`; auto, gpu: as many as there are GPUs",
        },
    },
    "jaxjob": {
        Does.HONOURED: {"jaxReplicaSpecs": "Worker: `workers`", "runPolicy": "see there"},
    },
    "mpijob": {
        Does.HONOURED: {
            "mpiReplicaSpecs": "Launcher: a role, whose end ends the run; Worker: `workers`",
            "slotsPerWorker": "`processes`",
            "runPolicy": "see there",
            "mpiImplementation": "OpenMPI and MPICH",
            "cleanPodPolicy": "see runPolicy",
            "backoffLimit": "see runPolicy",
            "activeDeadlineSeconds": "see runPolicy",
            "ttlSecondsAfterFinished": "see runPolicy",
        },
        Does.HARMLESS: {
            "sshAuthMountPath": "there is no ssh: the launchers are the remote shell",
            "launcherCreationPolicy": "it starts when every worker is up",
            "waitForWorkers": "it starts when every worker is up",
            "mainContainer": "the container that trains",
        },
        Does.IGNORED: {
            "runLauncherAsWorker": "the launcher has no slots of its own; request one more worker",
        },
    },
    "replica": {
        Does.HONOURED: {
            "replicas": "how many",
            "template": "see a pod's spec",
            "restartPolicy": "OnFailure, Always: `retries`; Never: none; ExitCode: none, and losses cost nothing",
        },
    },
    "policy": {
        Does.HONOURED: {
            "backoffLimit": "`retries`",
            "activeDeadlineSeconds": "`timeout`, of each attempt",
            "schedulingPolicy": "see there",
            "suspend": "true is noted",
        },
        Does.HARMLESS: {
            "cleanPodPolicy": "pods are deleted when the run ends; logs, outputs and checkpoints stay",
            "ttlSecondsAfterFinished": "pods are deleted when the run ends; the run's record stays",
            "managedBy": "Stoker runs it",
        },
    },
    "scheduling": {
        Does.HONOURED: {
            "scheduleTimeoutSeconds": "`start_within`",
            "minAvailable": "all tasks start together, or none",
        },
        Does.HARMLESS: {"minResources": "the tasks' resources count"},
        Does.SAID: {"queue": "Stoker has its own queue"},
        Does.IGNORED: {
            "priorityClass": "Stoker has its own queue; `--set priority=high` goes first there",
        },
    },
    "elastic": {
        Does.HONOURED: {
            "minReplicas": "`workers`: the least",
            "maxReplicas": "`workers`: the most",
            "nProcPerNode": "`processes`",
            "maxRestarts": "`retries`",
        },
        Does.SAID: dict.fromkeys(
            ("rdzvBackend", "rdzvPort", "rdzvHost", "rdzvId", "rdzvConf", "standalone"), _RENDEZVOUS
        ),
        Does.IGNORED: {"metrics": "the number of workers follows what is free, not metrics"},
    },
    "trainjob": {
        Does.HONOURED: {
            "runtimeRef": "see there",
            "trainer": "see there",
            "podTemplateOverrides": "see there",
            "podSpecOverrides": "as podTemplateOverrides",
            "suspend": "true is noted",
            "activeDeadlineSeconds": "`timeout`, of each attempt",
        },
        Does.HARMLESS: {"managedBy": "Stoker runs it"},
        Does.SAID: {
            "labels": "for the runtime's objects, which are not created",
            "annotations": "for the runtime's objects, which are not created",
        },
        Does.IGNORED: {
            "initializer": "nothing is fetched before the training; mount a volume, or fetch in the script",
            "modelConfig": "nothing is fetched before the training; mount a volume, or fetch in the script",
            "datasetConfig": "nothing is fetched before the training; mount a volume, or fetch in the script",
            "runtimePatches": "only podTemplateOverrides are supported",
        },
    },
    "runtime": {
        Does.HONOURED: {
            "name": "one of the standard runtimes, which have a built-in meaning",
            "apiGroup": "`trainer.kubeflow.org`",
            "kind": "ClusterTrainingRuntime",
        },
    },
    "trainer": {
        Does.HONOURED: {
            "image": "`image`; without it the runtime's",
            "command": "`run`",
            "args": "after `command`",
            "env": "see a container's env",
            "numNodes": "`workers`",
            "numProcPerNode": "`processes`; auto: as many as there are GPUs",
            "resourcesPerNode": "`resources`",
        },
    },
    "target": {Does.HONOURED: {"name": "`node`, `launcher`"}},
    "override": {
        Does.HONOURED: {
            "targetJobs": "`node`, `launcher`: of the tasks that train; others are noted",
            "metadata": "labels and annotations, on its pods",
            "spec": "see a pod's spec",
        },
    },
}

ROWS: tuple[Row, ...] = tuple(
    Row(scope, key, does, words)
    for scope, parts in _TABLE.items()
    for does, keys in parts.items()
    for key, words in keys.items()
)
BY_SCOPE: dict[str, dict[str, Row]] = {
    scope: {row.key: row for row in ROWS if row.scope == scope} for scope in SCOPES
}
