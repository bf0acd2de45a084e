"""Volumes and their mounts: as mounts of the job where it has a form for them, else in its pods."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stoker.spec import names, quantities
from stoker.spec.interop.ledger import Ledger, Level, View
from stoker.spec.problems import show

_ON_CLUSTER = ("configMap", "downwardAPI", "ephemeral", "secret", "projected", "nfs", "csi", "hostPath")
_SHM = "/dev/shm"


@dataclass
class Mounted:
    """What a container mounts of its pod's volumes."""

    mounts: dict[str, str] = field(default_factory=dict)
    shm: int | None = None
    volumes: list[dict[str, Any]] = field(default_factory=list)
    """For the pod, as written."""
    volume_mounts: list[dict[str, Any]] = field(default_factory=list)
    lines: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    """Path in the task -> path in the file."""


def mounted(pod: View, container: View, folders: dict[str, str] | None) -> Mounted:
    """`folders`: claims that stand for folders of this machine; None: a cluster with its own volumes."""
    found = Mounted()
    volumes = {}
    for view in pod.items("volumes", "volume"):
        name = view.text("name") or ""
        if name in volumes:
            view.mistake("name", f"{show(name)} is given twice", "Rename one of them.")
        volumes[name] = view
    used: set[str] = set()
    for mount in container.items("volumeMounts", "mount"):
        name, path = mount.text("name") or "", mount.text("mountPath") or ""
        volume = volumes.get(name)
        if volume is None:
            there = ", ".join(volumes) or "none"
            mount.mistake("name", f"there is no volume {show(name)}", f"Volumes of the pod: {there}.")
        elif not path:
            mount.mistake("mountPath", "is missing", "Write where it is mounted, as in `/data`.")
        else:
            used.add(name)
            _mount(found, volume, mount, path, folders)
    for name, view in volumes.items():
        if name not in used:
            view.whole()
            view.ledger.note(view.at, view.value, "the training's container does not mount it", Level.SAID)
    return found


def _mount(found: Mounted, volume: View, mount: View, path: str, folders: dict[str, str] | None) -> None:
    ledger = volume.ledger
    read_only = bool(mount.switch("readOnly"))
    part = (mount.text("subPath") or "").strip("/")
    if "persistentVolumeClaim" in volume:
        claim = volume.child("persistentVolumeClaim", "claim")
        name = claim.text("claimName")
        if not name:
            claim.mistake("claimName", "is missing", "Name the claim.")
            return
        read_only = bool(claim.switch("readOnly")) or read_only
        source = _source(volume, name, part, folders)
        if source is not None:
            _put(found, ledger, mount, path, source + (":ro" if read_only else ""))
        return
    if "emptyDir" in volume:
        _empty(found, volume, mount, path)
        return
    kind = next((key for key in _ON_CLUSTER if key in volume), None)
    if kind is None:
        if all(value is None for key, value in volume.value.items() if key != "name"):
            volume.mistake("name", "names no source for the volume", "Add `emptyDir: {}`.")
    elif folders is not None:
        if kind == "hostPath":
            why = "a file may not give a folder of the host to a container"
            volume.note(kind, why, Level.REFUSED)
        else:
            volume.note(kind, "there is no cluster to take it from")
    else:
        volume.take(kind)
        if kind == "hostPath":
            volume.note(
                kind, "gives the pod a part of its host; the cluster's admin has to allow it", Level.SAID
            )
        whole = {"name": str(volume.value["name"]), kind: _modes(volume.value[kind])}
        if whole not in found.volumes:
            found.volumes.append(whole)
        found.volume_mounts.append(dict(mount.value))


def _source(volume: View, claim: str, part: str, folders: dict[str, str] | None) -> str | None:
    if folders is None:
        return f"pvc://{claim}/{part}".rstrip("/")
    if claim in folders:
        return f"{folders[claim]}/{part}".rstrip("/")
    volume.note(
        "persistentVolumeClaim",
        f"there is no cluster to take it from; `--volume {claim}=PATH` says which folder it is here",
    )
    return None


def _empty(found: Mounted, volume: View, mount: View, path: str) -> None:
    wanted = volume.child("emptyDir", "empty")
    limit, medium = wanted.take("sizeLimit"), wanted.take("medium")
    if path.rstrip("/") == _SHM:
        if limit is not None:
            found.shm = volume.ledger.checked(wanted.path("sizeLimit"), quantities.memory, limit)
        return
    if path.rstrip("/") == "/tmp":
        return  # every task has its own
    if limit is not None:
        wanted.note("sizeLimit", "scratch is not limited by itself", Level.SAID)
    if medium:
        wanted.note("medium", "is on disk here", Level.SAID)
    _put(found, volume.ledger, mount, path, "empty")


def _put(found: Mounted, ledger: Ledger, mount: View, path: str, source: str) -> None:
    clean = ledger.checked(mount.path("mountPath"), names.mount_path, path)
    if clean is None:
        return
    if clean in found.mounts:
        mount.mistake("mountPath", f"{show(clean)} is mounted twice", "Mount one of them elsewhere.")
    found.mounts[clean] = source
    found.lines[clean] = mount.path("mountPath")


def _modes(value: Any) -> Any:
    """Kubernetes writes file modes in octal."""
    if isinstance(value, dict):
        return {
            key: _octal(item) if key in ("defaultMode", "mode") else _modes(item)
            for key, item in value.items()
        }
    return [_modes(item) for item in value] if isinstance(value, list) else value


def _octal(value: Any) -> Any:
    if not isinstance(value, str) or not value.lstrip("0o").isdigit():
        return value
    return int(value, 8) if value.startswith("0") else int(value)
