"""Names of images: `[HOST[:PORT]/]PATH[:TAG][@DIGEST]`, with Docker's defaults.

`torch` means `docker.io/library/torch:latest`. A first part with a dot, a colon or the name `localhost` is a host.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from stoker.errors import SpecError

DOCKER_HUB: Final = "docker.io"
_HUB_NAMES = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
_LONGEST_PATH = 255

_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")


@dataclass(frozen=True)
class Reference:
    """One image; with neither tag nor digest a repository."""

    host: str
    """With its port, where one is given; `docker.io` for Docker Hub."""
    path: str
    tag: str | None = None
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parses a reference as users write it. Neither tag nor digest means the tag `latest`."""
        rest, at, digest = text.partition("@")
        if at and not DIGEST.fullmatch(digest):
            raise _wrong(text, f"{digest!r} is not a digest, which is sha256: and 64 hex digits")
        host, path = _split_host(rest)
        path, tag = _split_tag(path)
        if tag is not None and not _TAG.fullmatch(tag):
            raise _wrong(text, f"{tag!r} is not a tag")
        if not _HOST.fullmatch(host) or _port_of(host) > 65535:
            raise _wrong(text, f"{host!r} is not a host")
        host = host.lower()
        if host in _HUB_NAMES:
            host = DOCKER_HUB
            path = path if "/" in path or not path else f"library/{path}"
        if not _PATH.fullmatch(path) or len(path) > _LONGEST_PATH:
            raise _wrong(text, _about_path(path))
        return cls(host, path, tag or (None if digest else "latest"), digest or None)

    @property
    def api_host(self) -> str:
        """The host of the registry API for this host."""
        return "registry-1.docker.io" if self.host == DOCKER_HUB else self.host

    @property
    def repository(self) -> str:
        return f"{self.host}/{self.path}"

    @property
    def version(self) -> str:
        """The version to request: the digest if there is one, else the tag."""
        return self.digest or self.tag or "latest"

    def pinned(self, digest: str) -> Reference:
        """The same image by its digest. The tag stays for readers; registries and runtimes use the digest."""
        return replace(self, digest=digest)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.repository}{tag}{digest}"


def _split_host(text: str) -> tuple[str, str]:
    first, slash, rest = text.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost" or first != first.lower()):
        return first, rest
    return DOCKER_HUB, text


def _split_tag(path: str) -> tuple[str, str | None]:
    head, slash, last = path.rpartition("/")
    name, colon, tag = last.partition(":")
    return head + slash + name, tag if colon else None


def _port_of(host: str) -> int:
    port = re.search(r":([0-9]+)$", host.rpartition("]")[2] if "]" in host else host)
    return int(port.group(1)) if port else 0


def _about_path(path: str) -> str:
    if not path:
        return "it names no repository"
    if len(path) > _LONGEST_PATH:
        return f"its path is longer than {_LONGEST_PATH} characters"
    if path != path.lower():
        return f"repositories are written in lower case: {path.lower()!r}"
    return f"{path!r} is not a repository"


def _wrong(text: str, why: str) -> SpecError:
    shown = text if len(text) <= 100 else text[:97] + "..."
    hint = "Write it as in `registry.example.com/team/torch:2.9`."
    scheme, found, rest = text.partition("://")
    if found and re.fullmatch(r"[a-z-]+", scheme):
        why, hint = "a reference has no scheme", f"Write {rest!r}."
    return SpecError(f"{shown!r} is not an image reference: {why}", hint=hint)
