"""Reads images from registries and pushes them, over the OCI distribution protocol.

Documents have size limits, digests are verified, and `HostRules` limits the hosts that a registry can send this client
to.
"""

from __future__ import annotations

import difflib
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from stoker.errors import ImageMissing, StokerError
from stoker.images import accounts, pushing
from stoker.images import manifest as documents
from stoker.images.accounts import Account
from stoker.images.build import Image
from stoker.images.logins import Logins
from stoker.images.manifest import Blob, ImageConfig
from stoker.images.reference import Reference
from stoker.images.rules import HostRules
from stoker.images.session import RepositoryRequest, Session, check

LARGEST_MANIFEST: Final = 4 << 20
LARGEST_CONFIG: Final = 8 << 20
_LARGEST_LIST = 1 << 20
_REMEMBERED = 256


class Registry:
    """A client for all registries. May be used from any thread; close it when done.

    Content is cached by its digest: reading the same image again costs one small request.
    """

    def __init__(self, *, logins: Logins | None = None, rules: HostRules | None = None) -> None:
        self._session = Session(logins or Logins(), rules or HostRules())
        self._lock = threading.Lock()
        self._blobs: OrderedDict[str, bytes] = OrderedDict()
        self._accounts: OrderedDict[tuple[str, str], Account] = OrderedDict()

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._session.close()

    def config(
        self, name: str | Reference, *, platforms: Sequence[str] = ("linux/amd64", "linux/arm64")
    ) -> ImageConfig:
        """The image's settings, and its reference pinned to the present digest.

        For an image with several platforms, the first of `platforms` that it has.
        """
        reference = _parsed(name)
        named, top = self._manifest(reference)
        digest, found = named, top
        if documents.is_index(top):
            chosen = documents.choose(top, platforms, reference)
            digest, found = self._manifest(replace(reference, digest=chosen.digest))
        config, layers = documents.parts(found, reference)
        data = self._blob(reference, config)
        parsed = documents.document(data, f"the config of {reference}")
        result = documents.read_config(parsed, reference.pinned(named), digest, layers)
        if result.architecture and result.platform not in platforms:
            raise documents.other_platform(reference, platforms, [result.platform])
        return result

    def account(self, config: ImageConfig) -> Account:
        """User and group id that the image runs as. Reads layers where the image has only a name."""
        key = (config.digest, config.user)
        with self._lock:
            if key in self._accounts:
                return self._accounts[key]
        found = accounts.find(self._session, config)
        with self._lock:
            _remember(self._accounts, key, found)
        return found

    def digest(self, name: str | Reference) -> str | None:
        """The digest that the reference names; None when there is no such image."""
        try:
            return self._manifest(_parsed(name))[0]
        except ImageMissing:
            return None

    def tags(self, name: str | Reference) -> list[str]:
        """A repository's tags (the first page)."""
        reference = _parsed(name)
        with self._session.open(RepositoryRequest(reference, "GET", "tags/list?n=1000")) as answer:
            check(answer, reference, 200)
            found = documents.document(answer.read(_LARGEST_LIST, "the list of tags"), "the list of tags")
        return [tag for tag in found.get("tags") or [] if isinstance(tag, str)]

    def push(self, image: Image, name: str | Reference, *, mount_from: Sequence[str] = ()) -> Reference:
        """Pushes an image under this name and returns its reference with the digest.

        Sends only what is missing. `mount_from`: repositories of the same registry that may have layers already.
        """
        return pushing.push(self._session, image, _parsed(name), mount_from)

    def _manifest(self, reference: Reference) -> tuple[str, dict[str, Any]]:
        """Digest and content of what a reference names, an index or a manifest."""
        what = f"the manifest of {reference}"
        data = self._known(reference.digest)
        if data is None:
            ask = RepositoryRequest(
                reference, "GET", f"manifests/{reference.version}", headers={"Accept": documents.ACCEPT}
            )
            with self._session.open(ask) as answer:
                if answer.status == 404:
                    answer.read(LARGEST_MANIFEST, "the refusal")
                else:
                    check(answer, reference, 200)
                    data = answer.read(LARGEST_MANIFEST, what)
        if data is None:
            raise self._missing(reference)
        digest = reference.digest or f"sha256:{hashlib.sha256(data).hexdigest()}"
        self._keep(digest, documents.verified(data, digest, what))
        return digest, documents.document(data, what)

    def _blob(self, reference: Reference, blob: Blob) -> bytes:
        """A config, complete and verified."""
        what = f"the config of {reference}"
        data = self._known(blob.digest)
        if data is None:
            with self._session.open(RepositoryRequest(reference, "GET", f"blobs/{blob.digest}")) as answer:
                check(answer, reference, 200)
                data = documents.verified(answer.read(LARGEST_CONFIG, what), blob.digest, what)
            self._keep(blob.digest, data)
        return data

    def _known(self, digest: str | None) -> bytes | None:
        with self._lock:
            return self._blobs.get(digest) if digest else None

    def _keep(self, digest: str, data: bytes) -> None:
        if len(data) <= _LARGEST_LIST:
            with self._lock:
                _remember(self._blobs, digest, data)

    def _missing(self, reference: Reference) -> ImageMissing:
        """The error for a missing image. Names the nearest tag, which costs one more request."""
        try:
            tags = self.tags(reference)
        except StokerError:
            tags = []  # only the hint needs it: that the image is missing is known already
        if not tags:
            near = difflib.get_close_matches(reference.path, self._repositories(reference), n=1, cutoff=0.7)
            return ImageMissing(
                f"there is no {reference}: {reference.host} has no repository {reference.path}",
                hint=f"Did you mean `{reference.host}/{near[0]}`?"
                if near
                else "Check the spelling; an image that was only built and never pushed is on no registry.",
                details={"reference": str(reference)},
            )
        near = difflib.get_close_matches(reference.tag or "", tags, n=1, cutoff=0.5)
        hint = f"Did you mean `{reference.repository}:{near[0]}`?" if near else f"It has {_some(tags)}."
        return ImageMissing(
            f"there is no {reference}: {reference.repository} has no {reference.version}",
            hint=hint,
            details={"reference": str(reference), "tags": tags[:100]},
        )

    def _repositories(self, reference: Reference) -> list[str]:
        """Other repositories of the registry. Many registries do not list them."""
        ask = RepositoryRequest(reference, "GET", f"{self._session.base(reference)}/v2/_catalog?n=1000")
        try:
            with self._session.open(ask) as answer:
                check(answer, reference, 200)
                found = documents.document(answer.read(_LARGEST_LIST, "the catalog"), "the catalog")
        except StokerError:
            return []  # only a hint, as above
        return [name for name in found.get("repositories") or [] if isinstance(name, str)]


def _parsed(name: str | Reference) -> Reference:
    return name if isinstance(name, Reference) else Reference.parse(name)


def _remember(known: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    known[key] = value
    while len(known) > _REMEMBERED:
        known.popitem(last=False)


def _some(tags: list[str]) -> str:
    last = ", ".join(tags[-5:])
    return f"{last} and {len(tags) - 5} more tags" if len(tags) > 5 else last
