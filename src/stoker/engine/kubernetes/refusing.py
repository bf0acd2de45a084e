"""What a cluster, as its admin set it up, will not run. Pure."""

from __future__ import annotations

import re

from stoker.engine.kubernetes.config import ClusterConfig
from stoker.engine.kubernetes.volumes import claim_of
from stoker.errors import Refused
from stoker.spec import Job, refuse_unsupported

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
        _refuse_input(name, uri)
    if job.launcher == "none":
        _refuse_plain(job)


def _refuse_input(name: str, uri: str) -> None:
    key = {"key": f"inputs.{name}"}
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


def _refuse_plain(job: Job) -> None:
    """Without a launcher nothing of ours is in the container."""
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
