"""As whom containers run and what they may do. Pure.

`restricted` meets Kubernetes' pod security level of that name; `baseline` lets an image's own user, root too, be.
The courier runs as the same user as the training: it has to read files that are for their owner only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.engine.kubernetes.config import ClusterConfig

USUAL = 1000
"""The user of images that say none, or one by name: names are not known before the image runs."""

Object = dict[str, Any]


@dataclass(frozen=True)
class User:
    """None: the image's or the platform's business."""

    uid: int | None
    gid: int | None = None
    ours: int | None = None
    """Of init and courier, where it cannot be the same."""


def user_of(image: Mapping[str, Any], config: ClusterConfig) -> User:
    if config.user == "platform":
        return User(None)
    if isinstance(config.user, int):
        return User(config.user, config.user)
    uid, gid, named = _parsed(str(image.get("user") or ""))
    if config.security == "restricted":
        uid = uid or USUAL
        return User(uid, gid or uid)
    if not named:
        return User(uid or 0, gid if gid is not None else uid or 0)
    # A name means whatever the image's passwd says. Our own image does not know it, but root reads everything.
    return User(None, ours=0 if config.stoker_image else None)


def of_pod(user: User, config: ClusterConfig) -> Object:
    found: Object = {}
    if config.security == "restricted":
        found["runAsNonRoot"] = True
    if user.uid is not None:
        found |= {"runAsUser": user.uid, "runAsGroup": user.gid}
        if user.gid:
            found |= {"fsGroup": user.gid, "fsGroupChangePolicy": "OnRootMismatch"}
    return found | {"seccompProfile": {"type": "RuntimeDefault"}}


def secret_mode(user: User) -> int:
    """Of files from a Secret. They are root's; the pod's own group may read them, where it has one."""
    return 0o440 if user.gid else 0o444


def of_ours(user: User, config: ClusterConfig) -> Object:
    """Of init and courier: they write to their volumes only."""
    found = _limited(config) | {"readOnlyRootFilesystem": True}
    if user.ours is not None:
        found["runAsUser"] = user.ours
    return found


def of_main(config: ClusterConfig, rdma: bool) -> Object:
    found = _limited(config)
    if config.read_only_root:
        found["readOnlyRootFilesystem"] = True
    if rdma and config.rdma is not None and config.rdma.capability:
        found["capabilities"] = {**found.get("capabilities", {}), "add": ["IPC_LOCK"]}
    return found


def _limited(config: ClusterConfig) -> Object:
    if config.security == "baseline":
        return {}
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _parsed(text: str) -> tuple[int | None, int | None, bool]:
    """An image's USER: (uid, gid, whether it is a name)."""
    first, _, second = text.partition(":")
    named = bool(first) and not first.isdecimal() and first != "root"
    uid = int(first) if first.isdecimal() else None
    gid = int(second) if second.isdecimal() else None
    return uid, gid, named
