"""The users that containers run as, and their privileges. Pure.

`restricted` meets Kubernetes' pod security level of that name; `baseline` allows an image's own user, including root.
The courier runs as the same user as the training, because each must read files that the other wrote with mode 0600.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.engine.kubernetes.config import ClusterConfig

USUAL = 1000
"""The user for images that name none, or name one by text: such names are unknown before the image runs."""

Object = dict[str, Any]


@dataclass(frozen=True)
class User:
    """None: left to the image or the platform."""

    uid: int | None
    gid: int | None = None


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
    # A user name is defined by the image's passwd file. Containers of that image agree on it; Stoker's image lacks it.
    return User(USUAL, USUAL) if config.stoker_image else User(None)


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
    """The mode of files from a Secret. They belong to root; the pod's group, if it has one, may read them."""
    return 0o440 if user.gid else 0o444


def of_ours(config: ClusterConfig) -> Object:
    """For init and courier: they write only to their volumes."""
    return _limited(config) | {"readOnlyRootFilesystem": True}


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
