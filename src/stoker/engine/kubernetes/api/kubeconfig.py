"""Address and credentials of an API server, from kubeconfig files or from a pod's service account.

The rules are kubectl's. Of several files the first that names a cluster, user or context defines all of it. Paths are
relative to their file. Inline data takes precedence over a path.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from stoker.errors import SpecError

IN_CLUSTER = "in-cluster"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_EXEC_EXTENSION = "client.authentication.k8s.io/exec"
_PLUGIN_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Plugin:
    """A program that prints credentials."""

    command: str
    """A name for PATH, or an absolute path."""
    args: tuple[str, ...] = field(default=(), repr=False)
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Added to the server's own environment."""
    api: str = _PLUGIN_VERSIONS[0]
    install_hint: str = ""
    cluster_info: bool = False
    """The plugin needs the cluster's address and certificates."""


@dataclass(frozen=True)
class User:
    """The user's credentials. If a secret is given as data and as file, only one is set here, except for the token:
    its file takes precedence, and the data is used until the file can be read."""

    token: str = field(default="", repr=False)
    token_file: Path | None = None
    cert: bytes = field(default=b"", repr=False)
    cert_file: Path | None = None
    key: bytes = field(default=b"", repr=False)
    key_file: Path | None = None
    username: str = ""
    password: str = field(default="", repr=False)
    plugin: Plugin | None = None
    headers: tuple[tuple[str, str], ...] = ()
    """Impersonation."""


@dataclass(frozen=True)
class KubeConfig:
    """Everything needed to connect to one cluster as one user. Its repr shows no credentials."""

    server: str
    """Without a trailing slash; may have a path."""
    namespace: str = "default"
    context: str = ""
    user: User = field(default_factory=User)
    ca: bytes = field(default=b"", repr=False)
    ca_file: Path | None = None
    insecure: bool = False
    tls_server_name: str = ""
    proxy_url: str = field(default="", repr=False)
    """Takes precedence over the environment."""
    plugin_config: Any = field(default=None, repr=False)
    """The cluster's configuration for credential plugins."""
    kubeconfig: str | Path = ""
    """The argument of `load`, to read it again when credentials are refused."""

    @classmethod
    def load(
        cls, kubeconfig: str | Path = "", context: str = "", *, env: Mapping[str, str] | None = None
    ) -> KubeConfig:
        """`kubeconfig`: a path; "" for kubectl's rules ($KUBECONFIG with several files merged, ~/.kube/config, and
        inside a pod without either its service account); "in-cluster" for the service account.
        `context`: "" for the current one. SpecError names the file and the mistake."""
        env = os.environ if env is None else env
        if str(kubeconfig) == IN_CLUSTER:
            return in_cluster(env)
        paths = _paths(kubeconfig, env)
        present = [path for path in paths if path.is_file()]
        if not present and not kubeconfig and "KUBERNETES_SERVICE_HOST" in env:
            return in_cluster(env)
        if not present:
            raise SpecError(
                f"no kubeconfig at {', '.join(map(str, paths))}",
                hint="Name the file, or set KUBECONFIG.",
            )
        return _chosen([_File.read(path) for path in present], context, kubeconfig)


def in_cluster(env: Mapping[str, str], directory: Path = SERVICE_ACCOUNT) -> KubeConfig:
    """The service account of the pod in which the server runs. Its token changes, so its file is read each time."""
    host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
    token, namespace = directory / "token", directory / "namespace"
    if not host or not token.is_file():
        raise SpecError(
            f"not inside a pod with a service account: {'no ' + str(token) if host else 'KUBERNETES_SERVICE_HOST is unset'}",
            hint="Name a kubeconfig file instead of in-cluster.",
        )
    return KubeConfig(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        namespace=namespace.read_text().strip() if namespace.is_file() else "default",
        user=User(token_file=token),
        ca_file=directory / "ca.crt",
        kubeconfig=IN_CLUSTER,
    )


def _paths(kubeconfig: str | Path, env: Mapping[str, str]) -> list[Path]:
    if kubeconfig:
        return [Path(kubeconfig).expanduser()]
    if named := [part for part in env.get("KUBECONFIG", "").split(os.pathsep) if part]:
        return [Path(part) for part in named]
    home = env.get("HOME")
    return [(Path(home) if home else Path.home()) / ".kube" / "config"]


@dataclass(frozen=True)
class _File:
    path: Path
    content: Entry = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> _File:
        import yaml  # slow to load, and most commands need no cluster

        try:
            content = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except OSError as exc:
            raise SpecError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
        except (yaml.YAMLError, ValueError) as exc:
            mark = getattr(exc, "problem_mark", None)
            where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
            # The parser's own message quotes the file, which holds credentials.
            raise SpecError(f"{where}: not YAML") from exc
        if content is not None and not isinstance(content, Mapping):
            raise SpecError(f"{path}: not a kubeconfig: its top level is not a mapping")
        return cls(path.absolute(), content or {})

    def entries(self, section: str) -> Iterator[tuple[str, Entry]]:
        """(name, body) of `clusters`, `users` or `contexts`."""
        for entry in self.content.get(section) or ():
            if isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
                yield entry["name"], entry.get(section.removesuffix("s")) or {}


@dataclass(frozen=True)
class _Part:
    """One cluster, user or context, with the file it came from."""

    what: str
    file: _File
    body: Entry = field(repr=False)

    def text(self, key: str) -> str:
        value = self.body.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.wrong(f"{key} is not text")
        return value

    def flag(self, key: str) -> bool:
        value = self.body.get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(f"{key} is neither true nor false")
        return value

    def data(self, key: str) -> bytes:
        """The decoded value of a base64 key."""
        try:
            return base64.b64decode(self.text(key), validate=True)
        except (binascii.Error, ValueError):
            raise self.wrong(f"{key} is not base64") from None

    def path(self, key: str) -> Path | None:
        value = self.text(key)
        return self.file.path.parent / value if value else None

    def wrong(self, problem: str, hint: str | None = None) -> SpecError:
        return SpecError(f"{self.file.path}: {self.what}: {problem}", hint=hint)


def _chosen(files: list[_File], context: str, kubeconfig: str | Path) -> KubeConfig:
    name = context or next(
        (str(f.content["current-context"]) for f in files if f.content.get("current-context")), ""
    )
    if not name:
        raise SpecError(
            f"{files[0].path}: no current context",
            hint=f"Name one of: {', '.join(_names(files, 'contexts')) or 'none is defined'}.",
        )
    chosen = _find(files, "contexts", name)
    cluster = _find(files, "clusters", chosen.text("cluster"))
    user = _user(_find(files, "users", chosen.text("user"))) if chosen.text("user") else User()
    ca = cluster.data("certificate-authority-data")
    return KubeConfig(
        server=_server(cluster),
        namespace=chosen.text("namespace") or "default",
        context=name,
        user=user,
        ca=ca,
        ca_file=None if ca else cluster.path("certificate-authority"),
        insecure=cluster.flag("insecure-skip-tls-verify"),
        tls_server_name=cluster.text("tls-server-name"),
        proxy_url=cluster.text("proxy-url"),
        plugin_config=_extension(cluster),
        kubeconfig=kubeconfig,
    )


def _find(files: list[_File], section: str, name: str) -> _Part:
    kind = section.removesuffix("s")
    for file in files:
        for found, body in file.entries(section):
            if found == name:
                return _Part(f"{kind} {name}", file, body)
    raise SpecError(
        f"{', '.join(str(file.path) for file in files)}: no {kind} {name!r}",
        hint=f"There are: {', '.join(_names(files, section)) or 'none'}.",
    )


def _names(files: list[_File], section: str) -> list[str]:
    return sorted({name for file in files for name, _ in file.entries(section)})


def _server(cluster: _Part) -> str:
    server = cluster.text("server").rstrip("/")
    parts = urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise cluster.wrong("server is not https://HOST[:PORT]")
    return server


def _extension(cluster: _Part) -> Any:
    for entry in cluster.body.get("extensions") or ():
        if isinstance(entry, Mapping) and entry.get("name") == _EXEC_EXTENSION:
            return entry.get("extension")
    return None


def _user(part: _Part) -> User:
    if part.body.get("auth-provider"):
        raise part.wrong(
            "auth-provider is not supported",
            hint="Use the provider's exec plugin (kubelogin, gke-gcloud-auth-plugin, ...) instead.",
        )
    cert, key = part.data("client-certificate-data"), part.data("client-key-data")
    cert_file = None if cert else part.path("client-certificate")
    key_file = None if key else part.path("client-key")
    if bool(cert or cert_file) != bool(key or key_file):
        raise part.wrong("client-certificate and client-key need each other")
    return User(
        token=part.text("token"),
        token_file=part.path("tokenFile"),
        cert=cert,
        cert_file=cert_file,
        key=key,
        key_file=key_file,
        username=part.text("username"),
        password=part.text("password"),
        plugin=_plugin(part),
        headers=tuple(_impersonation(part)),
    )


def _plugin(user: _Part) -> Plugin | None:
    body = user.body.get("exec")
    if body is None:
        return None
    if not isinstance(body, Mapping):
        raise user.wrong("exec is not a mapping")
    part = _Part(f"{user.what}: exec", user.file, body)
    api, command = part.text("apiVersion"), part.text("command")
    if api not in _PLUGIN_VERSIONS:
        raise part.wrong(
            f"apiVersion {api!r} is not supported", hint=f"Supported are: {', '.join(_PLUGIN_VERSIONS)}."
        )
    if not command:
        raise part.wrong("command is missing")
    if part.text("interactiveMode") == "Always":
        raise part.wrong(
            "interactiveMode: Always needs a terminal, and a server has none",
            hint="Use credentials that do not need a terminal.",
        )
    return Plugin(
        command=str(part.file.path.parent / command) if "/" in command else command,
        args=tuple(str(arg) for arg in body.get("args") or ()),
        env=tuple((str(pair["name"]), str(pair.get("value", ""))) for pair in body.get("env") or ()),
        api=api,
        install_hint=part.text("installHint").strip(),
        cluster_info=part.flag("provideClusterInfo"),
    )


def _impersonation(part: _Part) -> Iterator[tuple[str, str]]:
    if name := part.text("as"):
        yield "Impersonate-User", name
    if uid := part.text("as-uid"):
        yield "Impersonate-Uid", uid
    for group in part.body.get("as-groups") or ():
        yield "Impersonate-Group", str(group)
    for key, values in (part.body.get("as-user-extra") or {}).items():
        for value in values:
            yield f"Impersonate-Extra-{quote(str(key), safe='')}", str(value)
