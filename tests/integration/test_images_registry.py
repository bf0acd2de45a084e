"""Reading and pushing images at a real registry: open, with passwords, with tokens, with TLS."""

from __future__ import annotations

import base64
import json
import threading
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate
from images import LocalRegistry

from stoker.errors import ImageMissing, RegistryDenied, RegistryUnreachable
from stoker.images import HostRules, Logins, Registry, pushing
from stoker.images.build import Image, Settings, assemble
from stoker.images.layers import LayerTree, write_layer

HTPASSWD = "bob:$2y$05$TBlJnUeII1fa2DJAEAx5GeIuCZCAkgg9LJnEoAvGR2r0B8C5gJNDe\n"
"""The password is hunter2."""


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return make(tmp_path, "one")


def make(folder: Path, text: str, **settings: Any) -> Image:
    base, top = LayerTree(), LayerTree()
    base.file("etc/passwd", "root:x:0:0::/:/bin/sh\napp:x:1000:1001::/:/bin/sh\n")
    base.file("etc/group", "root:x:0:\nstaff:x:50:\n")
    top.file("app/text", text)
    layers = [write_layer(tree, folder / f"{text}-{i}") for i, tree in enumerate((base, top))]
    return assemble(layers, Settings(**{"user": "app:staff", "entrypoint": ("/entry",), **settings}))


@pytest.fixture
def open_registry(tmp_path: Path) -> Iterator[LocalRegistry]:
    with LocalRegistry(tmp_path / "registry") as registry:
        yield registry


def logins(host: str, pair: str) -> Logins:
    entry = {"auth": base64.b64encode(pair.encode()).decode()}
    return Logins.parse(json.dumps({"auths": {host: entry}}), source="config.json")


def test_push_and_read(open_registry: LocalRegistry, image: Image) -> None:
    name = f"{open_registry.host}/team/app:1"
    with Registry() as registry:
        assert registry.digest(name) is None
        reference = registry.push(image, name)
        assert str(reference) == f"{name}@{image.digest}" and registry.digest(name) == image.digest
        assert registry.push(image, name) == reference
        for asked in (name, str(reference), f"{open_registry.host}/team/app@{image.digest}"):
            config = registry.config(asked)
            assert (config.user, config.entrypoint, config.digest) == ("app:staff", ("/entry",), image.digest)
        assert [layer.digest for layer in config.layers] == [layer.digest for layer in image.layers]
        assert config.size == sum(layer.size for layer in image.layers)
        account = registry.account(config)
        assert (account.uid, account.gid) == (1000, 50)
        with pytest.raises(ImageMissing) as caught:
            registry.config(f"{open_registry.host}/team/app:11")
        assert caught.value.hint == f"Did you mean `{name}`?"
        with pytest.raises(ImageMissing) as caught:
            registry.config(f"{open_registry.host}/team/ap:1")
        assert caught.value.hint == f"Did you mean `{open_registry.host}/team/app`?"


def test_layers_in_several_chunks(
    open_registry: LocalRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = LayerTree()
    tree.file("noise", b"".join(str(i * 7919 % 10007).encode() for i in range(200_000)))
    image = assemble([write_layer(tree, tmp_path / "layer")], Settings())
    size = image.layers[0].size
    with Registry() as registry:
        for chunk in (size // 3, size // 2, size - 1, size, size + 1):
            monkeypatch.setattr(pushing, "CHUNK", chunk)
            name = f"{open_registry.host}/chunks/c{chunk}:1"
            registry.push(image, name)
            assert registry.config(name).layers[0].digest == image.layers[0].digest


def test_layers_of_other_repositories_are_not_sent_again(
    open_registry: LocalRegistry, image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Registry() as registry:
        registry.push(image, f"{open_registry.host}/team/app:1")
        sent: list[str] = []
        real = pushing._upload

        def upload(session: Any, reference: Any, digest: str, body: Any, where: str) -> None:
            sent.append(digest)
            real(session, reference, digest, body, where)

        monkeypatch.setattr(pushing, "_upload", upload)
        other = make(tmp_path, "two")
        registry.push(other, f"{open_registry.host}/team/other:1", mount_from=["team/none", "team/app"])
        assert sent == [other.layers[1].digest, other.config_blob.digest]
        assert registry.account(registry.config(f"{open_registry.host}/team/other:1")).uid == 1000


def test_many_threads_share_a_client(open_registry: LocalRegistry, tmp_path: Path) -> None:
    images = [make(tmp_path, f"i{i}") for i in range(8)]
    with Registry() as registry, ThreadPoolExecutor(8) as pool:
        names = [f"{open_registry.host}/many/i{i}:1" for i in range(8)]
        list(pool.map(registry.push, images, names))
        found = list(pool.map(registry.config, names * 4))
    assert [config.digest for config in found] == [image.digest for image in images] * 4


def test_a_damaged_layer_is_noticed(open_registry: LocalRegistry, image: Image, tmp_path: Path) -> None:
    name = f"{open_registry.host}/team/app:1"
    with Registry() as registry:
        registry.push(image, name)
        digest = image.layers[0].digest.partition(":")[2]
        (blob,) = (tmp_path / "registry/data").rglob(f"{digest}/data")
        data = bytearray(blob.read_bytes())
        data[len(data) // 2] ^= 1
        blob.write_bytes(data)
        with pytest.raises(Exception, match=r"does not have this digest|is damaged|is not a tar"):
            registry.account(registry.config(name))


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[LocalRegistry]:
    """A registry that knows one user, with htpasswd."""
    file = tmp_path / "htpasswd"
    file.write_text(HTPASSWD)
    with LocalRegistry(
        tmp_path / "registry", auth={"htpasswd": {"realm": "r", "path": str(file)}}
    ) as registry:
        yield registry


def test_passwords(locked: LocalRegistry, image: Image) -> None:
    name = f"{locked.host}/team/app:1"
    with Registry(logins=logins(locked.host, "bob:hunter2")) as registry:
        registry.push(image, name)
        assert registry.config(name).user == "app:staff"
    with Registry(logins=logins(locked.host, "bob:wrong")) as registry:
        for action in (lambda: registry.config(name), lambda: registry.push(image, name)):
            with pytest.raises(RegistryDenied, match="the login of 'bob' from config"):
                action()
    with Registry() as registry, pytest.raises(RegistryDenied, match="there is no login"):
        registry.config(name)


class TokenServer:
    """Gives tokens by Docker's specification: bob may do everything, every client may pull `public/*`."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        leaf = authority.issue_cert("tokens.example")
        self.bundle = folder / "tokens.pem"
        authority.cert_pem.write_to_path(str(self.bundle))
        key = load_pem_private_key(leaf.private_key_pem.bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key
        chain = [load_pem_x509_certificate(pem.bytes()) for pem in leaf.cert_chain_pems]
        self._chain = [base64.b64encode(one.public_bytes(Encoding.DER)).decode() for one in chain]
        self.scopes: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
                self._answer(query, self.headers.get("Authorization") or "")

            def do_POST(self) -> None:
                form = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                query = {"service": form["service"], "scope": form["scope"][0].split(" ")}
                self._answer(query, "Identity " + form["refresh_token"][0])

            def _answer(self, query: dict[str, list[str]], said: str) -> None:
                server.scopes += query["scope"]
                bob = said in ("Basic " + base64.b64encode(b"bob:hunter2").decode(), "Identity bobs")
                if said and not bob:
                    self.send_response(401)
                    self.end_headers()
                    return
                body = json.dumps(
                    {"token": server.token(query["service"][0], query["scope"], bob), "expires_in": 300}
                )
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.realm = f"http://127.0.0.1:{self._server.server_address[1]}/token"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def token(self, service: str, scopes: list[str], bob: bool) -> str:
        access = []
        for kind, name, actions in (scope.split(":") for scope in scopes):
            granted = actions.split(",") if bob else ["pull"] if name.startswith("public/") else []
            access.append({"type": kind, "name": name, "actions": granted})
        now = int(time.time())
        claims = {
            "iss": "test",
            "sub": "",
            "aud": service,
            "exp": now + 300,
            "nbf": now - 60,
            "iat": now,
            "jti": "1",
        }
        head = {"typ": "JWT", "alg": "ES256", "x5c": self._chain}
        text = ".".join(_coded(json.dumps(part).encode()) for part in (head, {**claims, "access": access}))
        r, s = utils.decode_dss_signature(self._key.sign(text.encode(), ec.ECDSA(SHA256())))
        return f"{text}.{_coded(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _coded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


@pytest.fixture
def tokens(tmp_path: Path) -> Iterator[TokenServer]:
    server = TokenServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def guarded(tmp_path: Path, tokens: TokenServer) -> Iterator[LocalRegistry]:
    auth = {
        "realm": tokens.realm,
        "service": "the registry",
        "issuer": "test",
        "rootcertbundle": str(tokens.bundle),
    }
    with LocalRegistry(tmp_path / "registry", auth={"token": auth}) as registry:
        yield registry


def test_tokens(guarded: LocalRegistry, tokens: TokenServer, image: Image, tmp_path: Path) -> None:
    private, public = f"{guarded.host}/team/app:1", f"{guarded.host}/public/app:1"
    with Registry(logins=logins(guarded.host, "bob:hunter2")) as registry:
        registry.push(image, private)
        assert set(tokens.scopes) == {"repository:team/app:pull,push"}
        tokens.scopes.clear()
        registry.push(make(tmp_path, "two"), public, mount_from=["team/app"])
        assert set(tokens.scopes) == {"repository:public/app:pull,push", "repository:team/app:pull"}
        tokens.scopes.clear()
        assert registry.config(private).user == "app:staff"
        assert tokens.scopes == [], "the token is reused"
    with Registry() as registry:
        assert registry.config(public).user == "app:staff"
        with pytest.raises(RegistryDenied, match="there is no login"):
            registry.config(private)
        with pytest.raises(RegistryDenied, match="there is no login"):
            registry.push(image, public)
    with (
        Registry(logins=logins(guarded.host, "bob:wrong")) as registry,
        pytest.raises(RegistryDenied, match="'bob'"),
    ):
        registry.config(public)
    identity = Logins.parse(json.dumps({"auths": {guarded.host: {"identitytoken": "bobs"}}}))
    with Registry(logins=identity) as registry:
        assert registry.config(private).user == "app:staff"


def test_tls(tmp_path: Path, image: Image) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    paths = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(str(paths[0]))
    certificate.private_key_pem.write_to_path(str(paths[1]))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with LocalRegistry(tmp_path / "registry", certificate=paths) as server:
        name = f"{server.host}/team/app:1"
        with Registry(rules=HostRules(ca_files=(str(tmp_path / "ca.pem"),))) as registry:
            registry.push(image, name)
            assert registry.config(name).digest == image.digest
        with Registry() as registry, pytest.raises(RegistryUnreachable, match="is not trusted"):
            registry.config(name)
