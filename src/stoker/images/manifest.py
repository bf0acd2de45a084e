"""The documents of an image as a registry sends them: untrusted JSON, checked field by field.

A manifest names a config and layers by their digests; an index names one manifest per platform. Docker's and OCI's
forms differ only in the media types.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from stoker.errors import ImageError
from stoker.images.reference import DIGEST, Reference

OCI_INDEX: Final = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
OCI_LAYER: Final = "application/vnd.oci.image.layer.v1.tar+gzip"
DOCKER_LIST: Final = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"
ACCEPT: Final = ", ".join((OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST))
_MOST_LAYERS = 1000
_MOST_WORDS = 10_000


@dataclass(frozen=True)
class Blob:
    """The description of one blob in a manifest."""

    digest: str
    size: int
    media_type: str


@dataclass(frozen=True)
class ImageConfig:
    reference: str
    """With the digest of what the reference names: of the index, if there is one."""
    digest: str
    """Digest of the manifest for this platform."""
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    workdir: str
    """Empty: `/`."""
    user: str
    """As in the image: `""` (root), `1000`, `app`, `1000:1000`, `app:staff`."""
    env: Mapping[str, str]
    labels: Mapping[str, str]
    os: str
    architecture: str
    layers: tuple[Blob, ...]

    @property
    def platform(self) -> str:
        return f"{self.os}/{self.architecture}"

    @property
    def size(self) -> int:
        """Compressed bytes of all layers, which a node has to pull."""
        return sum(layer.size for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "size": self.size}


def verified(data: bytes, digest: str, what: str) -> bytes:
    """Returns the bytes if they have this digest; else raises ImageError."""
    name, _, value = digest.partition(":")
    if not DIGEST.fullmatch(digest) or hashlib.new(name, data).hexdigest() != value:
        raise ImageError(
            f"{what} does not have the digest {digest}",
            hint="The registry, or a proxy before it, is damaged. Nothing of it was used.",
        )
    return data


def document(data: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ImageError(f"{what} is not a JSON object")
    return found


def is_index(found: Mapping[str, Any]) -> bool:
    return found.get("mediaType") in (OCI_INDEX, DOCKER_LIST) or "manifests" in found


def choose(index: Mapping[str, Any], platforms: Sequence[str], reference: Reference) -> Blob:
    """The manifest for the first of `platforms` (`linux/amd64`) that the index has."""
    offered: dict[str, Blob] = {}
    for entry in _list(index, "manifests", "the index"):
        found = entry.get("platform") if isinstance(entry, dict) else None
        if isinstance(found, dict):
            name = f"{found.get('os')}/{found.get('architecture')}"
            offered.setdefault(name, _blob(entry, "the index"))
    for platform in platforms:
        if platform in offered:
            return offered[platform]
    raise other_platform(reference, platforms, sorted(name for name in offered if "unknown" not in name))


def other_platform(reference: Reference, wanted: Sequence[str], offered: Sequence[str]) -> ImageError:
    return ImageError(
        f"{reference} is not available for {' or '.join(wanted)}",
        hint=f"It is available for {', '.join(offered[:20])}." if offered else "Its index names no platform.",
        details={"platforms": list(offered)},
    )


def parts(manifest: Mapping[str, Any], reference: Reference) -> tuple[Blob, tuple[Blob, ...]]:
    """Config and layers of a manifest."""
    what = f"the manifest of {reference}"
    if manifest.get("schemaVersion") != 2 or not isinstance(manifest.get("config"), dict):
        raise ImageError(
            f"{what} is not that of a container image",
            hint="Images pushed by very old Docker versions must be pushed again."
            if manifest.get("schemaVersion") == 1
            else "It may be a chart, a signature or another artifact.",
        )
    layers = tuple(_blob(entry, what) for entry in _list(manifest, "layers", what))
    if len(layers) > _MOST_LAYERS:
        raise ImageError(f"{what} has {len(layers)} layers, more than {_MOST_LAYERS}")
    return _blob(manifest["config"], what), layers


def read_config(
    data: Mapping[str, Any], reference: Reference, digest: str, layers: tuple[Blob, ...]
) -> ImageConfig:
    what = f"the config of {reference}"
    inner = data.get("config") or {}
    if not isinstance(inner, dict) or not isinstance(data.get("rootfs"), dict):
        raise ImageError(f"{what} is not that of a container image")
    labels = inner.get("Labels") or {}
    if not isinstance(labels, dict):
        raise ImageError(f"{what}: Labels is not an object")
    return ImageConfig(
        reference=str(reference),
        digest=digest,
        entrypoint=_words(inner, "Entrypoint", what),
        cmd=_words(inner, "Cmd", what),
        workdir=_text(inner, "WorkingDir", what),
        user=_text(inner, "User", what),
        env=dict(_pair(word) for word in _words(inner, "Env", what)),
        labels={str(name): str(value) for name, value in labels.items()},
        os=_text(data, "os", what) or "linux",
        architecture=_text(data, "architecture", what),
        layers=layers,
    )


def _pair(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value


def _blob(entry: Any, what: str) -> Blob:
    if not isinstance(entry, dict):
        raise ImageError(f"{what} is broken: {_short(entry)} is not a descriptor")
    digest, size = entry.get("digest"), entry.get("size")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise ImageError(f"{what} is broken: {_short(digest)} is not a digest")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ImageError(f"{what} is broken: {_short(size)} is not a size")
    return Blob(digest, size, str(entry.get("mediaType") or ""))


def _list(found: Mapping[str, Any], key: str, what: str) -> list[Any]:
    value = found.get(key) or []
    if not isinstance(value, list):
        raise ImageError(f"{what} is broken: {key} is not a list")
    return value


def _words(found: Mapping[str, Any], key: str, what: str) -> tuple[str, ...]:
    value = _list(found, key, what)
    if len(value) > _MOST_WORDS or not all(isinstance(word, str) and "\0" not in word for word in value):
        raise ImageError(f"{what} is broken: {key} is not a list of texts")
    return tuple(value)


def _text(found: Mapping[str, Any], key: str, what: str) -> str:
    value = found.get(key) or ""
    if not isinstance(value, str) or "\0" in value:
        raise ImageError(f"{what} is broken: {key} is not a text")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
