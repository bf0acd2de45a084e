"""The registry client against unusual and broken registries."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from stoker.errors import ImageError, ImageMissing, RegistryDenied, RegistryUnreachable, TooLarge
from stoker.images import Logins, Registry, auth
from support.fake_registry import MANIFEST, Fake, Reply, Seen, digest, logins

INDEX = "application/vnd.oci.image.index.v1+json"
PATH = "/v2/team/app"


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry() as made:
        yield made


def serve(fake: Fake, version: str, document: Any) -> str:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    for name in (version, digest(data)):
        fake.routes[f"GET {PATH}/manifests/{name}"] = Reply(200, {}, data)
    return digest(data)


def test_config(fake: Fake, registry: Registry) -> None:
    manifest = fake.serve_image(
        Entrypoint=["/entry", "a b"],
        Cmd=["x"],
        WorkingDir="/w",
        User="app:staff",
        Env=["PATH=/bin", "EMPTY=", "EQ=a=b"],
        Labels={"k": "v"},
    )
    config = registry.config(f"{fake.host}/team/app:1")
    assert config.entrypoint == ("/entry", "a b") and config.cmd == ("x",)
    assert (config.workdir, config.user, config.platform) == ("/w", "app:staff", "linux/amd64")
    assert config.env == {"PATH": "/bin", "EMPTY": "", "EQ": "a=b"} and config.labels == {"k": "v"}
    assert (
        config.reference == f"{fake.host}/team/app:1@{manifest['digest']}"
        and config.digest == manifest["digest"]
    )
    assert json.loads(json.dumps(config.to_json()))["entrypoint"] == ["/entry", "a b"]


def test_the_same_image_again_costs_one_request(fake: Fake, registry: Registry) -> None:
    fake.serve_image()
    first = registry.config(f"{fake.host}/team/app:1")
    count = len(fake.seen)
    assert registry.config(f"{fake.host}/team/app:1") == first
    assert len(fake.seen) == count + 1
    assert registry.config(first.reference) == first
    assert len(fake.seen) == count + 1, "by digest it cannot have changed"


def test_a_config_with_missing_keys(fake: Fake, registry: Registry) -> None:
    fake.serve_image(Entrypoint=None, Cmd=None, Env=None, Labels=None, User=None)
    config = registry.config(f"{fake.host}/team/app:1")
    assert (config.entrypoint, config.cmd, config.env, config.user, config.workdir) == ((), (), {}, "", "")


def test_an_index(fake: Fake, registry: Registry) -> None:
    manifest = fake.serve_image()
    other = "sha256:" + "0" * 64
    entries = [
        {"digest": other, "size": 1, "platform": {"os": "linux", "architecture": "arm64"}},
        {"digest": other, "size": 1, "platform": {"os": "unknown", "architecture": "unknown"}},
        {"digest": manifest["digest"], "size": 1, "platform": {"os": "linux", "architecture": "amd64"}},
    ]
    top = serve(fake, "many", {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries})
    config = registry.config(f"{fake.host}/team/app:many")
    assert config.reference.endswith(f":many@{top}") and config.digest == manifest["digest"]
    with pytest.raises(ImageError, match="not available for linux/s390x") as caught:
        registry.config(f"{fake.host}/team/app:many", platforms=["linux/s390x"])
    assert caught.value.hint == "It is available for linux/amd64, linux/arm64."


def test_an_image_of_another_platform(fake: Fake, registry: Registry) -> None:
    fake.serve_image()
    with pytest.raises(ImageError, match="not available for linux/arm64"):
        registry.config(f"{fake.host}/team/app:1", platforms=["linux/arm64"])


BROKEN: dict[str, Any] = {
    "no json": b"<html>",
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "an artifact": {"schemaVersion": 2, "layers": []},
    "version one": {"schemaVersion": 1, "fsLayers": []},
    "layers is a number": {
        "schemaVersion": 2,
        "config": {"digest": "sha256:" + "0" * 64, "size": 1},
        "layers": 7,
    },
    "digest with a path": {"schemaVersion": 2, "config": {"digest": "sha256:../../x", "size": 1}},
    "negative size": {"schemaVersion": 2, "config": {"digest": "sha256:" + "0" * 64, "size": -1}},
    "index of nothing": {"schemaVersion": 2, "manifests": [7]},
    "index without digest": {
        "schemaVersion": 2,
        "manifests": [{"platform": {"os": "linux", "architecture": "amd64"}}],
    },
}


@pytest.mark.parametrize("document", BROKEN.values(), ids=list(BROKEN))
def test_broken_manifests(fake: Fake, registry: Registry, document: Any) -> None:
    serve(fake, "1", document)
    with pytest.raises(ImageError):
        registry.config(f"{fake.host}/team/app:1")


@pytest.mark.parametrize(
    "config",
    [
        {"Entrypoint": "sh"},
        {"Entrypoint": [1]},
        {"Env": {"a": "b"}},
        {"User": 7},
        {"Labels": []},
        {"User": "a\0b"},
    ],
)
def test_broken_configs(fake: Fake, registry: Registry, config: dict[str, Any]) -> None:
    if config == {"Labels": []}:
        config = {"Labels": [1]}
    fake.serve_image(**config)
    with pytest.raises(ImageError, match="config"):
        registry.config(f"{fake.host}/team/app:1")


def test_bytes_that_do_not_have_their_digest(fake: Fake, registry: Registry) -> None:
    manifest = fake.serve_image(User="honest")
    route = f"GET {PATH}/blobs/{manifest['config']['digest']}"
    fake.routes[route] = Reply(200, {}, b'{"config": {"User": "root"}}')
    with pytest.raises(ImageError, match="does not have the digest"):
        registry.config(f"{fake.host}/team/app:1")
    fake.routes[f"GET {PATH}/manifests/{manifest['digest']}"] = Reply(200, {}, b"{}")
    with Registry() as fresh, pytest.raises(ImageError, match="does not have the digest"):
        fresh.config(f"{fake.host}/team/app@{manifest['digest']}")


def test_documents_have_caps(fake: Fake, registry: Registry) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b" " * 65536

    fake.routes[f"GET {PATH}/manifests/1"] = lambda seen: Reply(200, {}, endless())
    with pytest.raises(TooLarge, match="manifest"):
        registry.config(f"{fake.host}/team/app:1")
    manifest = fake.serve_image()
    fake.routes[f"GET {PATH}/blobs/{manifest['config']['digest']}"] = lambda seen: Reply(200, {}, endless())
    with pytest.raises(TooLarge, match="config"):
        registry.config(f"{fake.host}/team/app:1")


def test_an_answer_that_ends_early(fake: Fake, registry: Registry) -> None:
    fake.routes[f"GET {PATH}/manifests/1"] = Reply(200, {"Content-Length": "100"}, iter([b"{"]))
    with pytest.raises(RegistryUnreachable, match=r"ended early|IncompleteRead"):
        registry.config(f"{fake.host}/team/app:1")


def test_no_such_tag(fake: Fake, registry: Registry) -> None:
    fake.routes[f"GET {PATH}/tags/list"] = Reply(200, {}, b'{"tags": ["2.9.0-cuda", "latest", 7]}')
    with pytest.raises(ImageMissing, match=r"has no 2\.9\.1-cuda") as caught:
        registry.config(f"{fake.host}/team/app:2.9.1-cuda")
    assert caught.value.hint == f"Did you mean `{fake.host}/team/app:2.9.0-cuda`?"
    with pytest.raises(ImageMissing) as caught:
        registry.config(f"{fake.host}/team/app:zzzzzzzz")
    assert caught.value.hint == "It has 2.9.0-cuda, latest."


def test_no_such_repository(fake: Fake, registry: Registry) -> None:
    with pytest.raises(ImageMissing, match="has no repository team/app") as caught:
        registry.config(f"{fake.host}/team/app:1")
    assert "spelling" in str(caught.value.hint)
    fake.routes["GET /v2/_catalog"] = Reply(200, {}, b'{"repositories": ["team/apps", "other"]}')
    with pytest.raises(ImageMissing) as caught:
        registry.config(f"{fake.host}/team/app:1")
    assert caught.value.hint == f"Did you mean `{fake.host}/team/apps`?"
    assert registry.digest(f"{fake.host}/team/app:1") is None


def test_temporary_errors_are_retried(fake: Fake, registry: Registry) -> None:
    fake.serve_image()
    good = fake.routes[f"GET {PATH}/manifests/1"]
    replies = [Reply(503), Reply(429, {}, b"slow down")]
    fake.routes[f"GET {PATH}/manifests/1"] = lambda seen: replies.pop() if replies else good  # type: ignore[return-value]
    assert registry.config(f"{fake.host}/team/app:1").user == ""


def test_a_registry_that_stays_broken_is_quoted(fake: Fake, registry: Registry) -> None:
    body = json.dumps({"errors": [{"code": "UNKNOWN", "message": "disk\x1b[31m full"}]}).encode()
    fake.routes[f"GET {PATH}/manifests/1"] = Reply(500, {}, body)
    with pytest.raises(ImageError, match=r"answered 500.*UNKNOWN disk\?\[31m full"):
        registry.config(f"{fake.host}/team/app:1")
    assert len(fake.seen) == 3


def test_connections_are_kept_and_stale_ones_replaced(fake: Fake, registry: Registry) -> None:
    fake.serve_image()
    registry.config(f"{fake.host}/team/app:1")
    before = fake.connections
    assert before <= 2, "one to learn that it knows no TLS, one for everything else"
    good = fake.routes[f"GET {PATH}/manifests/1"]
    assert isinstance(good, Reply) and isinstance(good.body, bytes)
    # Announces keep-alive and closes the connection, like a server that restarts.
    closing = Reply(200, {"Content-Length": str(len(good.body))}, iter([good.body]))
    closing.headers["Connection"] = "keep-alive"
    fake.routes[f"GET {PATH}/manifests/1"] = closing
    registry.config(f"{fake.host}/team/app:1")
    fake.routes[f"GET {PATH}/manifests/1"] = good
    registry.config(f"{fake.host}/team/app:1")


def test_no_registry(registry: Registry) -> None:
    with pytest.raises(RegistryUnreachable, match=r"nothing listens at 127\.0\.0\.1:1"):
        registry.config("127.0.0.1:1/team/app")
    with pytest.raises(RegistryUnreachable, match=r"there is no host 'surely-not\.invalid'") as caught:
        registry.config("surely-not.invalid/team/app")
    assert "registry's host" in str(caught.value.hint)


def basic(seen: Seen) -> Reply | None:
    """None for the right password."""
    if seen.headers.get("authorization") == "Basic " + base64.b64encode(b"bob:hunter2").decode():
        return None
    return Reply(401, {"WWW-Authenticate": 'Basic realm="x"'})


def guard(fake: Fake, check: Any) -> None:
    """Every route requires `check` to pass."""
    for route, reply in list(fake.routes.items()):
        fake.routes[route] = lambda seen, reply=reply: (
            check(seen) or (reply(seen) if callable(reply) else reply)
        )


def test_basic_logins(fake: Fake) -> None:
    fake.serve_image(User="7")
    guard(fake, basic)
    with Registry(logins=logins(fake.host)) as registry:
        assert registry.config(f"{fake.host}/team/app:1").user == "7"
        assert [bool(one.headers.get("authorization")) for one in fake.seen] == [False, True, True]
    with (
        Registry(logins=logins(fake.host, pair="bob:wrong")) as registry,
        pytest.raises(RegistryDenied) as denied,
    ):
        registry.config(f"{fake.host}/team/app:1")
    assert (
        "the login of 'bob' from config.json" in denied.value.message and "wrong" not in denied.value.message
    )
    assert denied.value.details["login"] == "bob"
    with Registry(logins=logins("other.example")) as registry, pytest.raises(RegistryDenied) as denied:
        registry.config(f"{fake.host}/team/app:1")
    assert f"no login for {fake.host} in config.json" in denied.value.message
    assert denied.value.hint == f"Check the name, or log in with `docker login {fake.host}`."


def test_a_login_without_rights(fake: Fake) -> None:
    fake.routes[f"GET {PATH}/manifests/1"] = Reply(403)
    with Registry() as registry, pytest.raises(RegistryDenied):
        registry.config(f"{fake.host}/team/app:1")


class Tokens:
    """A token server on the same fake: a valid login gets a token for the requested scope."""

    def __init__(self, fake: Fake, *, life: float | None = None, key: str = "token") -> None:
        self.asked: list[Seen] = []
        self.given = 0
        self._life = life
        self._key = key
        self.realm = f"http://{fake.host}/token"
        fake.routes["GET /token"] = fake.routes["POST /token"] = self._give

    def _give(self, seen: Seen) -> Reply:
        self.asked.append(seen)
        if seen.method == "GET" and basic(seen):
            return Reply(401)
        self.given += 1
        answer: dict[str, Any] = {self._key: f"t{self.given}"}
        return Reply(
            200, {}, json.dumps({**answer, "expires_in": self._life} if self._life else answer).encode()
        )

    def check(self, seen: Seen) -> Reply | None:
        if seen.path.startswith("/token") or seen.headers.get("authorization") == f"Bearer t{self.given}":
            return None
        challenge = f'Bearer realm="{self.realm}",service="a \\"b\\"",scope="repository:everything:delete"'
        return Reply(401, {"WWW-Authenticate": challenge}, b'{"errors": []}')


@pytest.mark.parametrize("key", ["token", "access_token"])
def test_tokens(fake: Fake, key: str) -> None:
    tokens = Tokens(fake, life=300, key=key)
    fake.serve_image()
    guard(fake, tokens.check)
    with Registry(logins=logins(fake.host)) as registry:
        registry.config(f"{fake.host}/team/app:1")
        registry.config(f"{fake.host}/team/app:1")
    assert tokens.given == 1
    assert tokens.asked[0].path == "/token?scope=repository%3Ateam%2Fapp%3Apull&service=a+%22b%22"


def test_expired_tokens(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(auth, "monotonic", lambda: now)
    tokens = Tokens(fake, life=300)
    fake.serve_image()
    guard(fake, tokens.check)
    with Registry(logins=logins(fake.host)) as registry:
        registry.config(f"{fake.host}/team/app:1")
        now += 289
        registry.config(f"{fake.host}/team/app:1")
        assert tokens.given == 1
        now += 2
        registry.config(f"{fake.host}/team/app:1")
        assert tokens.given == 2, "an old token is not even tried shortly before its end"
        tokens.given += 1  # as if the registry had revoked the last one
        registry.config(f"{fake.host}/team/app:1")
    assert tokens.given == 4


def test_tokens_for_an_identity(fake: Fake) -> None:
    tokens = Tokens(fake)
    fake.serve_image()
    guard(fake, tokens.check)
    config = {"auths": {fake.host: {"identitytoken": "refresh/me"}}}
    with Registry(logins=Logins.parse(json.dumps(config))) as registry:
        registry.config(f"{fake.host}/team/app:1")
    assert tokens.asked[0].method == "POST"
    assert b"grant_type=refresh_token&refresh_token=refresh%2Fme" in tokens.asked[0].body
    assert "authorization" not in tokens.asked[0].headers


def test_no_token_without_a_login(fake: Fake) -> None:
    tokens = Tokens(fake)
    fake.serve_image()
    guard(fake, tokens.check)
    with Registry() as registry, pytest.raises(RegistryDenied, match="no login"):
        registry.config(f"{fake.host}/team/app:1")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"token": 7}', b'{"token": "a\\r\\nX: y"}', b"{}", b"[" * 100_000]
)
def test_broken_token_servers(fake: Fake, body: bytes) -> None:
    fake.routes["GET /token"] = Reply(200, {}, body)
    fake.routes[f"GET {PATH}/manifests/1"] = Reply(
        401, {"WWW-Authenticate": f'Bearer realm="http://{fake.host}/token"'}
    )
    with Registry() as registry, pytest.raises(ImageError, match="token server"):
        registry.config(f"{fake.host}/team/app:1")


def test_media_types_are_asked_for(fake: Fake, registry: Registry) -> None:
    fake.serve_image()
    registry.config(f"{fake.host}/team/app:1")
    assert MANIFEST in fake.seen[0].headers["accept"] and INDEX in fake.seen[0].headers["accept"]
    assert fake.seen[0].headers["accept-encoding"] == "identity"
