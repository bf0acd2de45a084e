"""Requests about one repository: the address of its registry, the login, and the meaning of its refusals."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from stoker.errors import ImageError, StokerError
from stoker.images.auth import AuthHeaders
from stoker.images.connection import FileBody, Origin, shown
from stoker.images.logins import Logins
from stoker.images.manifest import document
from stoker.images.reference import Reference
from stoker.images.rules import HostRules
from stoker.images.wire import Answer, Call, Wire

_LARGEST_ERROR = 64 << 10


@dataclass(frozen=True)
class RepositoryRequest:
    reference: Reference
    method: str
    path: str
    """Below `/v2/PATH/`, or a whole URL from the registry."""
    actions: str = "pull"
    """What the token must allow: `pull` or `pull,push`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | FileBody | None = field(default=None, repr=False)
    source: str = ""
    """A second repository to read from, to mount its blobs."""

    @property
    def scope(self) -> str:
        own = f"repository:{self.reference.path}:{self.actions}"
        return f"{own} repository:{self.source}:pull" if self.source else own


class Session:
    """Connections and logins of one client. May be used from any thread."""

    def __init__(self, logins: Logins, rules: HostRules) -> None:
        self._wire = Wire(rules)
        self._keys = AuthHeaders(self._wire, logins)

    def close(self) -> None:
        self._wire.close()

    def base(self, reference: Reference) -> str:
        return self._wire.base(reference.api_host)

    @contextlib.contextmanager
    def open(self, ask: RepositoryRequest) -> Iterator[Answer]:
        """Sends a request, logs in if the registry requires it, and yields the answer, unless it is 401 or 403."""
        base = self.base(ask.reference)
        url = ask.path if "://" in ask.path else f"{base}/v2/{ask.reference.path}/{ask.path}"
        ours = Origin.of(url) == Origin.of(base)
        known = self._keys.known(ask.reference, ask.scope) if ours else None
        call = Call(ask.method, url, base, ask.headers, known, ask.body)
        with contextlib.ExitStack() as stack:
            answer = stack.enter_context(self._wire.open(call))
            if answer.status == 401 and ours and Origin.of(answer.url) == Origin.of(base):
                challenges = answer.challenges
                answer.read(_LARGEST_ERROR, "the registry's refusal")
                stack.close()
                header = self._keys.obtain(ask.reference, ask.scope, base, challenges)
                answer = stack.enter_context(self._wire.open(replace(call, authorization=header)))
            if answer.status in (401, 403):
                self._keys.forget(ask.reference, ask.scope)
                raise self._keys.refused(ask.reference)
            yield answer


def check(answer: Answer, reference: Reference, *wanted: int) -> None:
    """Raises the error for an unwanted status."""
    if answer.status in wanted:
        return
    text = _error_text(answer)
    raise ImageError(
        f"{shown(answer.url)} answered {answer.status} about {reference}" + (f": {text}" if text else ""),
        hint="Try again in a moment." if answer.status >= 500 or answer.status == 429 else None,
        details={"status": answer.status},
    )


def _error_text(answer: Answer) -> str:
    """The registry's own message, as one printable line."""
    try:
        first = document(answer.read(_LARGEST_ERROR, "an error"), "an error")["errors"][0]
        text = f"{first.get('code', '')} {first.get('message', '')}"
    except (StokerError, LookupError, TypeError, AttributeError):
        return ""  # no message in the registry's format: only the status
    return re.sub(r"[^\x20-\x7e]+", "?", text).strip()[:200]
