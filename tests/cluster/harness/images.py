"""Container images made from files, without a builder: one layer, pushed to the cluster's registry.

Only for the harness itself; the product's images are made and pushed by the product's code.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import HarnessError

__all__ = ["Image", "busybox", "push"]

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


@dataclass(frozen=True)
class Image:
    files: Mapping[str, Path | bytes | str]
    """Path in the image -> a file here, its content, or (a string) the target of a symbolic link."""
    directories: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    env: tuple[str, ...] = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",)
    user: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


def busybox() -> Image:
    """A shell and the usual small programs."""
    program = shutil.which("busybox")
    if program is None:
        raise HarnessError("no busybox on the PATH; install the package busybox-static")
    names = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    links: dict[str, Path | bytes | str] = {f"bin/{name}": "busybox" for name in names if name != "busybox"}
    files = {"bin/busybox": Path(program), "etc/passwd": b"root:x:0:0:root:/:/bin/sh\n", **links}
    return Image(files, directories=("tmp", "proc", "sys", "dev", "etc", "var/run"))


def push(registry: str, name: str, image: Image, tag: str = "1") -> str:
    """Push the image to the registry (host:port, plain HTTP); returns the reference to pull it by."""
    layer = _layer(image)
    packed = gzip.compress(layer, 1, mtime=0)
    config = _config(image, layer)
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _descriptor(_CONFIG, config),
        "layers": [_descriptor(_LAYER, packed)],
    }
    connection = http.client.HTTPConnection(registry, timeout=60)
    try:
        for blob in (packed, config):
            _upload(connection, name, blob)
        body = json.dumps(manifest).encode()
        _ask(connection, "PUT", f"/v2/{name}/manifests/{tag}", body, {"Content-Type": _MANIFEST}, 201)
    finally:
        connection.close()
    return f"{registry}/{name}:{tag}"


def _layer(image: Image) -> bytes:
    """A reproducible tar of the files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        folders = {str(parent) for path in image.files for parent in Path(path).parents if str(parent) != "."}
        for folder in sorted(folders | set(image.directories)):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        for path, content in sorted(image.files.items()):
            _add(tar, path, content)
    return out.getvalue()


def _add(tar: tarfile.TarFile, path: str, content: Path | bytes | str) -> None:
    entry = tarfile.TarInfo(path)
    if isinstance(content, str):
        entry.type, entry.linkname = tarfile.SYMTYPE, content
        tar.addfile(entry)
        return
    data = content.read_bytes() if isinstance(content, Path) else content
    executable = isinstance(content, Path) and os.access(content, os.X_OK)
    entry.size, entry.mode = len(data), 0o755 if executable else 0o644
    tar.addfile(entry, io.BytesIO(data))


def _config(image: Image, layer: bytes) -> bytes:
    config = {"Env": list(image.env), "Entrypoint": list(image.entrypoint), "User": image.user}
    return json.dumps(
        {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
            "os": "linux",
            "config": {**config, "Labels": dict(image.labels)},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    ).encode()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _descriptor(kind: str, data: bytes) -> dict[str, object]:
    return {"mediaType": kind, "digest": _digest(data), "size": len(data)}


def _upload(connection: http.client.HTTPConnection, name: str, blob: bytes) -> None:
    answer = _ask(connection, "POST", f"/v2/{name}/blobs/uploads/", b"", {}, 202)
    place = str(answer.getheader("Location"))
    glue = "&" if "?" in place else "?"
    headers = {"Content-Type": "application/octet-stream"}
    _ask(connection, "PUT", f"{place}{glue}digest={_digest(blob)}", blob, headers, 201)


def _ask(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes,
    headers: dict[str, str],
    want: int,
) -> http.client.HTTPResponse:
    if "://" in path:
        path = "/" + path.split("://", 1)[1].split("/", 1)[1]
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    said = answer.read()
    if answer.status != want:
        raise HarnessError(f"the registry answers {answer.status} to {method} {path}: {said[:500]!r}")
    return answer
