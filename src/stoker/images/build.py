"""Builds images from layers, without a daemon: configs, manifests, archives, and a cache of layers.

tree = Tree(); tree.file("app/train.py", ...)
layer = Cache().layer(key, lambda: tree)
image = assemble([layer], Settings(entrypoint=("python3", "/app/train.py")))
write_archive(image, Path("image.tar"), "registry.example.com/team/digits:1")   # or Registry().push(image, ...)
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.errors import ImageError
from stoker.images.layers import EPOCH, Layer, LayerTree, write_layer
from stoker.images.manifest import OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST, Blob
from stoker.images.reference import Reference

_KEPT = 30 * 24 * 3600.0
"""Seconds after which an unused layer is removed from the cache."""
_CREATED = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(EPOCH))


@dataclass(frozen=True)
class Settings:
    """The image's settings, as in ImageConfig."""

    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    workdir: str = ""
    user: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    architecture: str = "amd64"


@dataclass(frozen=True)
class Image:
    """A complete image: two small documents, and layers in files."""

    layers: tuple[Layer, ...]
    config: bytes
    manifest: bytes
    settings: Settings

    @property
    def digest(self) -> str:
        return _digest(self.manifest)

    @property
    def config_blob(self) -> Blob:
        return Blob(_digest(self.config), len(self.config), OCI_CONFIG)

    @property
    def size(self) -> int:
        """Bytes in a registry."""
        return len(self.manifest) + len(self.config) + sum(layer.size for layer in self.layers)


def assemble(layers: Sequence[Layer], settings: Settings) -> Image:
    """The image of these layers, the lowest first."""
    if not layers:
        raise ImageError("an image needs at least one layer")
    inner = {
        "User": settings.user,
        "WorkingDir": settings.workdir,
        "Env": [f"{name}={value}" for name, value in sorted(settings.env.items())],
        "Entrypoint": list(settings.entrypoint),
        "Cmd": list(settings.cmd),
        "Labels": dict(settings.labels),
    }
    config = _json(
        {
            "created": _CREATED,
            "architecture": settings.architecture,
            "os": "linux",
            "config": {name: value for name, value in inner.items() if value},
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
            "history": [{"created": _CREATED, "created_by": layer.made_by or "stoker"} for layer in layers],
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": _descriptor(OCI_CONFIG, _digest(config), len(config)),
            "layers": [_descriptor(OCI_LAYER, layer.digest, layer.size) for layer in layers],
        }
    )
    return Image(tuple(layers), config, manifest, settings)


def write_archive(image: Image, path: Path, name: str) -> None:
    """Writes an OCI layout in one tar under this name, as `ctr images import`, `podman load` and `skopeo` read it."""
    reference = Reference.parse(name)
    entry: dict[str, Any] = _descriptor(OCI_MANIFEST, image.digest, len(image.manifest))
    entry["platform"] = {"architecture": image.settings.architecture, "os": "linux"}
    entry["annotations"] = {
        "io.containerd.image.name": str(reference),
        "org.opencontainers.image.ref.name": reference.version,
    }
    files: dict[str, bytes | Layer] = {layer.digest: layer for layer in image.layers}
    files |= {image.digest: image.manifest, image.config_blob.digest: image.config}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as tar:
            _member(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
            index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}
            _member(tar, "index.json", _json(index))
            for digest in sorted(files):
                _member(tar, f"blobs/{digest.replace(':', '/')}", files[digest])
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


class Cache:
    """Layers built earlier, by a key that must name everything they were made of.

    Several processes may use it at once: a layer appears complete, and a second process replaces it by an equal one.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_home()

    def layer(self, key: str, make: Callable[[], LayerTree], made_by: str = "") -> Layer:
        folder = self.root / "layers"
        name = hashlib.sha256(key.encode()).hexdigest()
        path, note = folder / f"{name}.tar.gz", folder / f"{name}.json"
        if (known := _noted(path, note)) is not None:
            os.utime(note)
            return known.described(made_by)
        folder.mkdir(parents=True, exist_ok=True)
        _prune(folder)
        layer = write_layer(make(), path)
        temporary = note.with_name(f"{note.name}.{os.getpid()}.tmp")
        temporary.write_bytes(
            _json({"digest": layer.digest, "diff_id": layer.diff_id, "size": layer.size, "key": key})
        )
        temporary.rename(note)
        return layer.described(made_by)


def cache_home() -> Path:
    """The directory where builds keep what they need not fetch or make again. Safe to delete."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "stoker-images"


def _prune(folder: Path) -> None:
    """Deletes layers that were not used for a long time."""
    oldest = time.time() - _KEPT
    for note in folder.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # another process prunes too
            if note.stat().st_mtime < oldest:
                note.unlink()
                note.with_name(f"{note.stem}.tar.gz").unlink()


def _noted(path: Path, note: Path) -> Layer | None:
    """A cached layer; None if it is missing or incomplete."""
    try:
        found = json.loads(note.read_bytes())
        layer = Layer(path, str(found["digest"]), str(found["diff_id"]), int(found["size"]))
        with open(path, "rb") as file:
            whole = layer.digest == f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return layer if whole else None


def _member(tar: tarfile.TarFile, name: str, data: bytes | Layer) -> None:
    info = tarfile.TarInfo(name)
    info.mtime, info.mode = EPOCH, 0o644
    if isinstance(data, Layer):
        info.size = data.size
        with open(data.path, "rb") as file:
            tar.addfile(info, file)
    else:
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))


def _descriptor(media_type: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest, "size": size}


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
