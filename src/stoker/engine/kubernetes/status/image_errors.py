"""Explains why an image cannot be pulled or run. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stoker.task import container_layout

PULLING = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
        "ErrImagePullBackOff",
    }
)
"""Waiting reasons of a container that concern its image."""
NEVER = frozenset({"InvalidImageName", "ErrImageNeverPull"})
"""The reasons among them that never pass by themselves."""

_MISSING = ("not found", "manifest unknown", "name unknown", "does not exist", "no such image")
_DENIED = (
    "unauthorized",
    "denied",
    "authentication required",
    "authorization failed",
    "forbidden",
    "401",
    "403",
)
_AWAY = (
    "no such host",
    "connection refused",
    "timeout",
    "timed out",
    "x509",
    "tls:",
    "dial tcp",
    "eof",
    "50",
)
_PLATFORM = ("no match for platform", "exec format error", "no matching manifest")


def cannot_pull(image: str, reason: str, message: str, events: Sequence[str] = ()) -> str:
    """`message`: the container's. If it only reports the back-off, the events have the registry's message."""
    if reason == "InvalidImageName":
        return f"the image {image!r} is not a reference that can be pulled"
    said = _registry_message(message) or next(
        (found for text in reversed(events) if (found := _registry_message(text))), ""
    )
    start = f"the image {image} cannot be pulled"
    lower = said.lower()
    if any(sign in lower for sign in _PLATFORM):
        return f"{start}: it has no version for the nodes' architecture ({said})"
    if any(sign in lower for sign in _DENIED):
        return f"{start}: the registry requires a login that the cluster does not have ({said}); set `pull_secrets`"
    if any(sign in lower for sign in _MISSING):
        return f"{start}: the image does not exist ({said})"
    if any(sign in lower for sign in _AWAY):
        return f"{start}: its registry does not answer the node ({said})"
    return f"{start}{f': {said}' if said else ''}"


def cannot_run(image: str, code: int | None, reason: str, message: str) -> str | None:
    """None: the image is not the reason, as far as this shows."""
    if found := re.search(r"unsatisfied condition: (cuda\s*[<>=]+\s*[0-9.]+)", message):
        return (
            f"the image {image} needs {found[1]}, and the NVIDIA driver of the node is too old for it;"
            " use an image for an older CUDA or a node with a newer driver"
        )
    if code == container_layout.NO_PYTHON and ("no Python" in message or not message):
        said = message.removeprefix("stoker: ")
        return (
            f"the image {image} has no Python that the launcher can use ({said or 'none on its PATH'});"
            " name one with `python:`, or run the image unchanged with `launcher: none`"
        )
    if any(sign in message.lower() for sign in ("exec format error",)):
        return f"the image {image} is made for another machine architecture"
    if (found := re.search(r'exec:? "?/bin/sh"?', message)) and _is_missing(message[found.end() :]):
        return f"the image {image} has no shell; name its Python with `python:`"
    if (found := re.search(r'exec:? "?([^":]{1,255})"?: ', message)) and _is_missing(message[found.end() :]):
        return f"the image {image} has no {found[1]}"
    if "runAsNonRoot" in message or "non-numeric user" in message:
        return f"the image {image} would run as root or as a user without a number, which this cluster does not allow"
    return None


def _is_missing(words: str) -> bool:
    return "no such file" in words or "not found" in words


def _registry_message(message: str) -> str:
    """The registry's own message, without what the kubelet and the runtime put around it."""
    if not message or ("ack-off" in message and "rror" not in message):
        return ""
    text = re.sub(r"^Back-off pulling image \"[^\"]*\":? ?", "", message)
    text = re.sub(r"^(?:ErrImagePull|Error|Failed): ?", "", text)
    text = re.sub(r"^Failed to pull image \"[^\"]*\":? ?", "", text)
    text = re.sub(r"^(?:rpc error: code = \w+ desc = )+", "", text)
    text = re.sub(
        r"failed to (?:pull and unpack image|resolve reference|resolve image|copy) \"[^\"]*\":? ?", "", text
    )
    return text.strip(" :")
