"""Logins for registries, from the files of `docker login` and `podman login`.

A login belongs to one registry host and is offered to no other. Its secrets never appear in `repr`, messages or
arguments of processes.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.errors import RegistryDenied, SpecError
from stoker.images.reference import DOCKER_HUB, Reference

HELPER_TIMEOUT = 30.0
"""Seconds. A helper that opens a browser would block a server forever."""
_LARGEST_FILE = 4 << 20
_LARGEST_ANSWER = 1 << 20
_HUB_KEY = "https://index.docker.io/v1/"


@dataclass(frozen=True)
class Login:
    """The credentials for one registry."""

    user: str
    password: str = field(repr=False)
    token: str = field(default="", repr=False)
    """An identity token, which is exchanged for access tokens in place of the password."""
    source: str = ""
    """Its file or helper, for messages."""

    @property
    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()

    def describe(self) -> str:
        name = f"the login of {self.user!r}" if self.user else "the login"
        return f"{name} from {self.source}" if self.source else name


@dataclass(frozen=True)
class Logins:
    """Logins for several registries: the content of a config.json. May be used from any thread."""

    auths: Mapping[str, Any] = field(default_factory=dict, repr=False)
    helpers: Mapping[str, str] = field(default_factory=dict)
    """Registry host -> NAME of the program `docker-credential-NAME`."""
    store: str = ""
    """The helper for all other hosts."""
    source: str = ""

    @classmethod
    def load(cls, path: Path | None = None) -> Logins:
        """Reads `path`, else the first existing config.json. No login at all is no error."""
        for candidate in [path] if path else _usual_places():
            try:
                with open(candidate, "rb") as file:
                    data = file.read(_LARGEST_FILE + 1)
            except FileNotFoundError:
                if path:
                    raise SpecError(f"no file with logins at {path}") from None
                continue
            except OSError as exc:
                raise SpecError(f"logins at {candidate} cannot be read: {exc.strerror}") from exc
            return cls.parse(data, source=str(candidate), helpers=True)
        return cls(source="")

    @classmethod
    def parse(cls, data: bytes | str, *, source: str = "", helpers: bool = False) -> Logins:
        """Parses a config.json, or the content of a Secret of type kubernetes.io/dockerconfigjson.

        `helpers` lets it name programs to run: only for files of the user or the admin.
        """
        what = source or "the logins"
        if len(data) > _LARGEST_FILE:
            raise SpecError(f"{what}: larger than {_LARGEST_FILE >> 20} MiB")
        try:
            raw = json.loads(data)
        except (ValueError, RecursionError) as exc:
            raise SpecError(f"{what}: not JSON", hint="Log in again with `docker login`.") from exc
        if not isinstance(raw, dict):
            raise SpecError(f"{what}: not a JSON object", hint="Log in again with `docker login`.")
        auths, named = raw.get("auths") or {}, raw.get("credHelpers") or {}
        if not isinstance(auths, dict) or not isinstance(named, dict):
            raise SpecError(f"{what}: `auths` and `credHelpers` must be objects")
        if not helpers:
            return cls(auths=auths, source=source)
        store = raw.get("credsStore") or ""
        return cls(auths, {str(k): str(v) for k, v in named.items()}, str(store), source)

    def find(self, reference: Reference) -> Login | None:
        """The login for this repository's registry: from its own helper, its own entry, or the common helper."""
        host = _HUB_KEY if reference.host == DOCKER_HUB else reference.host
        if helper := self.helpers.get(reference.host) or self.helpers.get(host):
            return _ask(helper, host)
        if login := self._entry(reference):
            return login
        return _ask(self.store, host) if self.store else None

    def _entry(self, reference: Reference) -> Login | None:
        """The most specific entry: `quay.io/team/x` before `quay.io/team` before `quay.io` before `*.io`."""
        best: tuple[int, Any] | None = None
        for key, value in self.auths.items():
            weight = _weight(key, reference)
            if (
                weight
                and (best is None or weight > best[0])
                and isinstance(value, dict)
                and any(value.values())
            ):
                best = (weight, value)
        return _login(best[1], self.source) if best else None


def _usual_places() -> list[Path]:
    environ = os.environ
    places = [Path(environ["REGISTRY_AUTH_FILE"])] if environ.get("REGISTRY_AUTH_FILE") else []
    docker = environ.get("DOCKER_CONFIG")
    places.append(Path(docker) / "config.json" if docker else Path("~/.docker/config.json").expanduser())
    if environ.get("XDG_RUNTIME_DIR"):
        places.append(Path(environ["XDG_RUNTIME_DIR"]) / "containers/auth.json")
    base = environ.get("XDG_CONFIG_HOME") or "~/.config"
    places.append(Path(base).expanduser() / "containers/auth.json")
    return places


def _weight(key: str, reference: Reference) -> int:
    """How well an entry's key matches: 0 not at all, else more for a longer key."""
    plain = re.sub(r"^https?://", "", key).rstrip("/")
    host, _, path = plain.partition("/")
    if path in ("v1", "v2"):
        path = ""
    if host in ("index.docker.io", "registry-1.docker.io"):
        host = DOCKER_HUB
    if path and reference.path != path and not reference.path.startswith(path + "/"):
        return 0
    if host.lower() == reference.host:
        return 2 + len(path)
    return 1 if "*" in host and not path and _matches(host, reference.host) else 0


def _matches(pattern: str, host: str) -> bool:
    """Kubernetes' wildcards: a star matches at most one part of the name, and the port must be equal."""
    (pattern, _, port), (host, _, other) = pattern.partition(":"), host.partition(":")
    parts, labels = pattern.split("."), host.split(".")
    return (
        port == other
        and len(parts) == len(labels)
        and all(fnmatch.fnmatchcase(a, b) for a, b in zip(labels, parts, strict=True))
    )


def _login(entry: Mapping[str, Any], source: str) -> Login | None:
    user, password = str(entry.get("username") or ""), str(entry.get("password") or "")
    if entry.get("auth"):
        try:
            text = base64.b64decode(str(entry["auth"]), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as exc:
            raise SpecError(
                f"{source or 'the logins'}: an `auth` is not base64", hint="Log in again with `docker login`."
            ) from exc
        user, _, password = text.strip("\0").partition(":")
    token = str(entry.get("identitytoken") or "")
    return Login(user, password, token, source) if user or password or token else None


def _ask(helper: str, host: str) -> Login | None:
    """Runs `docker-credential-NAME get` with the host on its standard input; it prints the login as JSON."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", helper):
        raise SpecError(f"{helper!r} is not the name of a credential helper", hint="Fix config.json.")
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run(
            [program, "get"], input=host.encode(), capture_output=True, timeout=HELPER_TIMEOUT, check=False
        )
    except FileNotFoundError:
        raise RegistryDenied(
            f"the login for {host} is kept by {program}, which is not on the PATH",
            hint="Install it, or log in again without credential helpers.",
        ) from None
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise RegistryDenied(f"{program} did not give the login for {host}: {exc}") from exc
    if done.returncode != 0:
        output = (done.stdout + done.stderr).decode(errors="replace").strip()
        if "credentials not found" in output.lower():
            return None
        raise RegistryDenied(f"{program} did not give the login for {host}: {_line(output)}")
    return _answer(done.stdout, program)


def _answer(output: bytes, program: str) -> Login | None:
    try:
        found = json.loads(output[:_LARGEST_ANSWER])
        user, secret = str(found["Username"]), str(found["Secret"])
    except (ValueError, RecursionError, KeyError, TypeError) as exc:
        raise RegistryDenied(f"{program} did not answer with a login") from exc
    if user == "<token>":
        return Login("", "", secret, program)
    return Login(user, secret, "", program) if user or secret else None


def _line(text: str) -> str:
    first = text.splitlines()[0] if text else "it printed nothing"
    return "".join(c if c.isprintable() else "?" for c in first)[:200]
