"""Refuses jobs that a cluster, with its current settings, does not run. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from stoker.engine.kubernetes.config import ClusterConfig
from stoker.engine.kubernetes.manifests import template
from stoker.engine.kubernetes.manifests.volumes import claim_of
from stoker.errors import Refused
from stoker.spec import Job, refuse_unsupported
from stoker.spec.names import input_path

_CLAIM = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")


def refuse(job: Job, config: ClusterConfig, cluster: str) -> None:
    refuse_unsupported(job, "kubernetes")
    if job.image is None and not config.default_image:
        raise Refused(
            f"no image is named, and the cluster {cluster} has none of its own",
            hint=f"Write `image:`, or have an admin set one: `stoker cluster set {cluster} default_image=...`.",
            details={"key": "image"},
        )
    if job.pool is not None and job.pool not in config.pools:
        there = ", ".join(config.pools) or "none"
        raise Refused(
            f"the cluster {cluster} has no pool {job.pool!r}",
            hint=f"Its pools: {there}.",
            details={"key": "pool", "choices": list(config.pools)},
        )
    for name, uri in job.inputs.items():
        _refuse_input(name, uri, config)
    for path, source in job.mounts.items():
        _refuse_mount(path, source, config)
    _refuse_template(job, config, cluster)
    if job.launcher == "none":
        _refuse_launcherless(job)


def _refuse_input(name: str, uri: str, config: ClusterConfig) -> None:
    key = {"key": f"inputs.{name}"}
    if (path := input_path(uri)) is not None:
        raise Refused(
            f"the input {name} is {path} of one machine, which is not on a cluster",
            hint="Put it on a volume of the cluster and write `pvc://CLAIM/PATH`.",
            details=key,
        )
    if not uri.startswith("pvc://"):
        raise Refused(
            f"the input {name} ({uri}) cannot be brought to a cluster yet",
            hint="Put it on a volume and write `pvc://CLAIM/PATH`.",
            details=key,
        )
    claim, path = claim_of(uri)
    if not _CLAIM.fullmatch(claim) or ".." in path.split("/"):
        raise Refused(
            f"the input {name} ({uri}) names no volume claim", hint="Write `pvc://CLAIM/PATH`.", details=key
        )
    if claim == config.checkpoints:
        raise Refused(
            f"the input {name} ({uri}) is on the cluster's own claim, for checkpoints",
            hint="Name another claim: `pvc://CLAIM/PATH`.",
            details=key,
        )


def _refuse_mount(path: str, source: str, config: ClusterConfig) -> None:
    claim = claim_of(source.removesuffix(":ro"))[0] if source.startswith("pvc://") else ""
    if claim and (not _CLAIM.fullmatch(claim) or claim == config.checkpoints):
        what = (
            "is the cluster's own, for checkpoints" if claim == config.checkpoints else "is no volume claim"
        )
        raise Refused(
            f"{source}, to be mounted at {path}, {what}",
            hint="Name another claim: `pvc://CLAIM/PATH`.",
            details={"key": f"mounts.{path}"},
        )


def _refuse_template(job: Job, config: ClusterConfig, cluster: str) -> None:
    """A job's own additions to its pods. The admin decides about those that affect more than the pod."""
    named = [("pod", job.pod), *((f"roles.{name}.pod", role.pod) for name, role in job.roles.items())]
    found = [
        (f"{key}.{path}", what, hint)
        for key, pod in named
        if pod is not None
        for path, what, hint in [
            *template.mistakes(pod, config.allow, template.SAFE_IN_JOBS),
            *_checkpoints_claim(pod, config),
        ]
    ]
    if not found:
        return
    details = {"key": found[0][0], "keys": [key for key, _, _ in found], "cluster": cluster}
    if len(found) == 1:
        key, what, hint = found[0]
        raise Refused(f"{key} {what}", hint=hint, details=details)
    lines = [f"the cluster {cluster} does not allow {len(found)} settings of the pod"]
    for key, what, hint in found:
        lines += [f"  {key} {what}", f"    hint: {hint}"]
    raise Refused("\n".join(lines), details=details)


def _checkpoints_claim(pod: Mapping[str, Any], config: ClusterConfig) -> Iterator[tuple[str, str, str]]:
    spec = pod.get("spec")
    for volume in (spec.get("volumes") or ()) if isinstance(spec, Mapping) else ():
        claim = volume.get("persistentVolumeClaim") if isinstance(volume, Mapping) else None
        if config.checkpoints and isinstance(claim, Mapping) and claim.get("claimName") == config.checkpoints:
            yield (
                "spec.volumes",
                f"has {config.checkpoints}, which is the cluster's own",
                "Name another claim.",
            )


def _refuse_launcherless(job: Job) -> None:
    """Without a launcher Stoker runs nothing in the container, so these keys have no effect."""
    wants = {
        "setup": job.setup is not None,
        "framework": job.framework is not None,
        "processes": (job.processes or 1) > 1,
        "workers": job.workers.max > 1,
        "python": job.python is not None,
    }
    if found := [key for key, asked in wants.items() if asked]:
        raise Refused(
            f"`{found[0]}` needs the launcher, and the job says `launcher: none`",
            hint=f"Leave out `{found[0]}`, or `launcher: none`.",
            details={"key": found[0], "keys": found},
        )
