"""Answers a registry's demand for authentication: with nothing, a password, or a token from its token server.

Tokens are kept until shortly before they expire. They are bound to one registry and one scope
(`repository:NAME:pull`), which this client chooses, so a registry cannot widen it.
"""

from __future__ import annotations

import json
import re
import threading
import urllib.parse
from collections.abc import Sequence
from time import monotonic
from typing import Any

from stoker.errors import ImageError, RegistryDenied
from stoker.images.connection import Origin, shown
from stoker.images.logins import Login, Logins
from stoker.images.reference import Reference
from stoker.images.wire import Call, Wire

_LARGEST_TOKEN = 1 << 20
_SHORTEST_LIFE = 60.0
"""Seconds: the lifetime by the token specification where the answer gives none."""
_MARGIN = 10.0
_PAIR = re.compile(r'(?<![A-Za-z0-9_-])([A-Za-z0-9_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))\s*,?\s*')


class AuthHeaders:
    """The Authorization headers of one client. May be used from any thread."""

    def __init__(self, wire: Wire, logins: Logins) -> None:
        self._wire = wire
        self._logins = logins
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], tuple[str, float]] = {}
        """(registry, scope) -> (header, end of its validity by the monotonic clock)."""

    def known(self, reference: Reference, scope: str) -> str | None:
        with self._lock:
            header, end = self._known.get((reference.host, scope), (None, 0.0))
            return header if monotonic() < end else None

    def obtain(self, reference: Reference, scope: str, registry: str, challenges: Sequence[str]) -> str:
        """Answers a 401. Raises RegistryDenied without (better) credentials."""
        login = self._logins.find(reference)
        offers = dict(_challenge(text) for text in challenges)
        if "bearer" in offers:
            header, life = self._token(reference, scope, registry, offers["bearer"], login)
        elif "basic" in offers and login and not login.token:
            header, life = login.basic, float("inf")
        else:
            raise self.denied(reference, login)
        with self._lock:
            self._known[reference.host, scope] = (header, monotonic() + life)
        return header

    def forget(self, reference: Reference, scope: str) -> None:
        with self._lock:
            self._known.pop((reference.host, scope), None)

    def refused(self, reference: Reference) -> RegistryDenied:
        """The error for a registry that refused the credentials."""
        return self.denied(reference, self._logins.find(reference))

    def denied(self, reference: Reference, login: Login | None) -> RegistryDenied:
        if login is None:
            where = f" in {self._logins.source}" if self._logins.source else ""
            return RegistryDenied(
                f"{reference.host} does not show {reference.path} without a login, or has no such repository; "
                f"there is no login for {reference.host}{where}",
                hint=f"Check the name, or log in with `docker login {reference.host}`.",
                details={"host": reference.host, "login": None},
            )
        return RegistryDenied(
            f"{reference.host} refuses {reference.path} to {login.describe()}, or has no such repository",
            hint="Check the name and the rights of that login, or log in again.",
            details={"host": reference.host, "login": login.user},
        )

    def _token(
        self, reference: Reference, scope: str, registry: str, offer: dict[str, str], login: Login | None
    ) -> tuple[str, float]:
        realm = self._realm(registry, offer)
        call = _token_call(realm, registry, offer.get("service", ""), scope, login)
        with self._wire.open(call) as answer:
            body = answer.read(_LARGEST_TOKEN, "the answer of the token server")
            if answer.status in (400, 401, 403):
                raise self.denied(reference, login)
            if answer.status != 200:
                raise ImageError(f"the token server {shown(realm)} answered {answer.status}")
        found = _json(body, realm)
        token = found.get("token") or found.get("access_token")
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            raise ImageError(f"the token server {shown(realm)} gave no token")
        life = found.get("expires_in")
        life = float(life) if isinstance(life, int | float) and life > 0 else _SHORTEST_LIFE
        return f"Bearer {token}", max(life - _MARGIN, 1.0)

    def _realm(self, registry: str, offer: dict[str, str]) -> str:
        """The URL for tokens. Passwords are sent there, so it needs TLS unless the registry itself has none."""
        realm = offer.get("realm", "")
        origin = Origin.of(realm)
        plain = registry.startswith("http://") and self._wire.rules.may_be_plain(origin.host, origin.port)
        if origin.scheme == "http" and not plain:
            raise RegistryDenied(
                f"{Origin.of(registry).host} names {shown(realm)} for tokens, which is without TLS: refused"
            )
        return realm


def _token_call(realm: str, registry: str, service: str, scope: str, login: Login | None) -> Call:
    if login and login.token:
        form = {
            "grant_type": "refresh_token",
            "refresh_token": login.token,
            "service": service,
            "scope": scope,
            "client_id": "stoker",
        }
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        return Call("POST", realm, registry, headers, body=urllib.parse.urlencode(form).encode())
    query = [("scope", one) for one in scope.split(" ") if one]
    query += [("service", service)] if service else []
    url = realm + ("&" if "?" in realm else "?") + urllib.parse.urlencode(query)
    return Call("GET", url, registry, authorization=login.basic if login else None)


def _challenge(text: str) -> tuple[str, dict[str, str]]:
    """`Bearer realm="...",service="..."` as its scheme, in lower case, and its parameters."""
    scheme, _, rest = text.strip().partition(" ")
    values = {
        name.lower(): re.sub(r"\\(.)", r"\1", quoted) or bare for name, quoted, bare in _PAIR.findall(rest)
    }
    return scheme.lower(), values


def _json(body: bytes, realm: str) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ImageError(f"the token server {shown(realm)} did not answer in JSON")
    return found
