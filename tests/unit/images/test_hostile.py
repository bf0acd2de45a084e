"""Registries that redirect clients: to hosts that must not see a password, and to addresses inside the
network."""

from __future__ import annotations

import base64
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from stoker.errors import ImageError, Refused, RegistryDenied, RegistryUnreachable
from stoker.images import HostRules, Registry
from stoker.images.build import Image, Settings, assemble
from stoker.images.layers import LayerTree, write_layer
from support.fake_registry import Fake, Reply, Seen, digest, logins

PATH = "/v2/team/app"
PASSWORD = "Basic " + base64.b64encode(b"bob:hunter2").decode()
Names = dict[str, tuple[str, Fake | None]]
PUBLIC = "203.0.113.5"


def wants_password(reply: Reply) -> Callable[[Seen], Reply]:
    challenge = Reply(401, {"WWW-Authenticate": 'Basic realm="x"'})
    return lambda seen: reply if seen.headers.get("authorization") == PASSWORD else challenge


def redirect(url: str) -> Reply:
    return Reply(307, {"Location": url})


def got_passwords(fake: Fake) -> bool:
    return any("authorization" in one.headers or "hunter2" in str(one) for one in fake.seen)


@pytest.fixture
def far(fake: Fake, names: Names) -> Fake:
    """A registry with a public address, over plain HTTP that the admin allowed."""
    names["registry.example"] = (PUBLIC, fake)
    return fake


def rules(**more: tuple[str, ...]) -> HostRules:
    return HostRules(**{"plain": ("registry.example", "other.example", "inner.example"), **more})


def test_a_password_does_not_follow_a_redirect(fakes: Callable[..., Fake]) -> None:
    registry, thief, same_host = fakes(), fakes("127.0.0.2"), fakes()
    for other in (thief, same_host):
        manifest = registry.serve_image(User="5")
        config = manifest["config"]["digest"]
        kept = registry.routes[f"GET {PATH}/blobs/{config}"]
        other.routes["GET /stolen"] = kept
        registry.routes[f"GET {PATH}/blobs/{config}"] = wants_password(
            redirect(f"http://{other.host}/stolen?sig=1")
        )
        registry.routes[f"GET {PATH}/manifests/1"] = wants_password(
            registry.routes[f"GET {PATH}/manifests/1"]
        )  # type: ignore[arg-type]
        with Registry(logins=logins(registry.host, other.host)) as client:
            assert client.config(f"{registry.host}/team/app:1").user == "5"
        assert got_passwords(registry)
        assert other.paths() == ["GET /stolen?sig=1"] and not got_passwords(other)


def test_a_password_does_not_come_back_through_another_host(fakes: Callable[..., Fake]) -> None:
    registry, thief = fakes(), fakes()
    registry.routes[f"GET {PATH}/manifests/1"] = wants_password(redirect(f"http://{thief.host}/there"))
    thief.routes["GET /there"] = redirect(f"http://{registry.host}/v2/secret/blobs/x")
    with Registry(logins=logins(registry.host)) as client, pytest.raises(ImageError):
        client.config(f"{registry.host}/team/app:1")
    back = [one for one in registry.seen if "secret" in one.path]
    assert back and "authorization" not in back[0].headers and not got_passwords(thief)


def test_another_host_that_asks_for_a_password_gets_none(fakes: Callable[..., Fake]) -> None:
    registry, thief = fakes(), fakes()
    registry.routes[f"GET {PATH}/manifests/1"] = redirect(f"http://{thief.host}/there")
    thief.routes["GET /there"] = Reply(401, {"WWW-Authenticate": f'Bearer realm="http://{thief.host}/token"'})
    with Registry(logins=logins(registry.host, thief.host)) as client, pytest.raises(RegistryDenied):
        client.config(f"{registry.host}/team/app:1")
    assert thief.paths() == ["GET /there"] and not got_passwords(thief)


def test_tokens_do_not_follow_a_redirect(fakes: Callable[..., Fake]) -> None:
    registry, thief = fakes(), fakes()
    manifest = registry.serve_image()
    challenge = Reply(401, {"WWW-Authenticate": f'Bearer realm="http://{registry.host}/token"'})
    registry.routes["GET /token"] = Reply(200, {}, b'{"token": "precious"}')
    there = redirect(f"http://{thief.host}/blob")
    thief.routes["GET /blob"] = registry.routes[f"GET {PATH}/blobs/{manifest['config']['digest']}"]
    registry.routes[f"GET {PATH}/blobs/{manifest['config']['digest']}"] = lambda seen: (
        there if seen.headers.get("authorization") == "Bearer precious" else challenge
    )
    with Registry() as client:
        client.config(f"{registry.host}/team/app:1")
    assert thief.paths() == ["GET /blob"] and not got_passwords(thief)


def test_a_token_server_that_redirects(fakes: Callable[..., Fake]) -> None:
    registry, thief = fakes(), fakes()
    challenge = Reply(401, {"WWW-Authenticate": f'Bearer realm="http://{registry.host}/token"'})
    registry.routes[f"GET {PATH}/manifests/1"] = challenge
    registry.routes["GET /token"] = redirect(f"http://{thief.host}/token")
    thief.routes["GET /token"] = Reply(200, {}, b'{"token": "x"}')
    with Registry(logins=logins(registry.host)) as client, pytest.raises(RegistryDenied):
        client.config(f"{registry.host}/team/app:1")
    assert got_passwords(registry) and thief.seen and not got_passwords(thief)


INSIDE = [
    "http://169.254.169.254/latest/meta-data/",
    "http://[fd00:ec2::254]/latest/",
    "http://127.0.0.1:{port}/secret",
    "http://localhost:{port}/secret",
    "http://[::1]:{port}/secret",
    "http://[::ffff:127.0.0.1]:{port}/secret",
    "http://0.0.0.0:{port}/secret",
    "http://2130706433:{port}/secret",
    "http://0x7f.1:{port}/secret",
    "http://inner.example:{port}/secret",
]
EVERYTHING = ("169.254.169.254", "fd00:ec2::254", "::ffff:127.0.0.1", "0.0.0.0", "2130706433", "0x7f.1")


@pytest.mark.parametrize("url", INSIDE)
@pytest.mark.parametrize("way", ["manifest", "token", "upload"])
def test_nobody_is_sent_inside(
    far: Fake, fakes: Callable[..., Fake], names: Names, image: Image, url: str, way: str
) -> None:
    """Also where plain HTTP to the same host is allowed."""
    inside = fakes()
    inside.routes["GET /secret"] = inside.routes["PUT /secret"] = Reply(200, {}, b"{}")
    names["inner.example"] = ("169.254.169.254", inside)
    url = url.format(port=inside.port)
    if way == "manifest":
        far.routes[f"GET {PATH}/manifests/1"] = redirect(url)
    elif way == "token":
        far.routes[f"GET {PATH}/manifests/1"] = Reply(401, {"WWW-Authenticate": f'Bearer realm="{url}"'})
    else:
        far.routes[f"POST {PATH}/blobs/uploads/"] = Reply(202, {"Location": url})
    plain = rules(plain=("registry.example", "inner.example", *EVERYTHING))
    client = Registry(logins=logins("registry.example"), rules=plain)
    with client, pytest.raises(Refused, match="refused"):
        if way == "upload":
            client.push(image, "registry.example/team/app:1")
        else:
            client.config("registry.example/team/app:1")
    assert inside.seen == []


def test_an_admin_can_allow_it(far: Fake, fakes: Callable[..., Fake]) -> None:
    inside = fakes()
    manifest = far.serve_image(User="3")
    config = manifest["config"]["digest"]
    inside.routes["GET /store"] = far.routes[f"GET {PATH}/blobs/{config}"]
    far.routes[f"GET {PATH}/blobs/{config}"] = redirect(f"http://{inside.host}/store")
    with Registry(rules=rules(inside=(inside.host,))) as client:
        assert client.config("registry.example/team/app:1").user == "3"


def test_a_registry_that_moves_inside_meanwhile(far: Fake, names: Names) -> None:
    """The registry is public at first; then its name resolves to this machine, and it redirects to a service
    here."""

    def move(seen: Seen) -> Reply:
        names["registry.example"] = ("127.0.0.1", far)
        return redirect(f"http://127.0.0.1:{far.port}/secret")

    far.routes[f"GET {PATH}/manifests/1"] = move
    far.routes["GET /secret"] = Reply(200, {}, b"{}")
    with Registry(rules=rules()) as client, pytest.raises(Refused):
        client.config("registry.example/team/app:1")
    assert not any("secret" in path for path in far.paths())


@pytest.mark.parametrize("host", ["169.254.169.254", "[fd00:ec2::254]", "0.0.0.0:{port}", "inner.example"])
def test_images_at_inside_addresses_are_refused(fake: Fake, names: Names, host: str) -> None:
    names["inner.example"] = ("127.0.0.1", fake)
    fake.serve_image()
    with Registry() as client, pytest.raises(Refused, match="refused"):
        client.config(f"{host.format(port=fake.port)}/team/app:1")
    assert fake.seen == []


def test_a_shared_server_can_close_loopback(fake: Fake) -> None:
    fake.serve_image()
    with Registry(rules=HostRules(loopback=False)) as client, pytest.raises(Refused, match="loopback"):
        client.config(f"{fake.host}/team/app:1")
    assert fake.connections == 0


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://x/",
        "gopher://x/",
        "http://",
        "http://[",
        "http://u:p@other.example/",
        "http://a:99999/",
    ],
)
def test_other_schemes(fake: Fake, url: str) -> None:
    fake.routes[f"GET {PATH}/manifests/1"] = redirect(url)
    with Registry() as client, pytest.raises(ImageError, match=r"address|5 times") as caught:
        client.config(f"{fake.host}/team/app:1")
    assert "u:p" not in str(caught.value)


def test_redirects_without_end(fake: Fake) -> None:
    fake.routes[f"GET {PATH}/manifests/1"] = redirect(f"http://{fake.host}{PATH}/manifests/1")
    with Registry() as client, pytest.raises(ImageError, match="more than 5 times"):
        client.config(f"{fake.host}/team/app:1")
    assert len(fake.seen) == 6


def test_plain_http_only_where_allowed(far: Fake, names: Names) -> None:
    far.serve_image()
    names["other.example"] = (PUBLIC, far)
    with Registry() as client, pytest.raises(RegistryUnreachable):
        client.config("registry.example/team/app:1")
    assert far.seen == []
    with Registry(rules=rules()) as client:
        assert client.config("registry.example/team/app:1").user == ""


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def secure(authority: trustme.CA, fakes: Callable[..., Fake], names: Names) -> Fake:
    """registry.example with a certificate of a private CA."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("registry.example").configure_cert(context)
    fake = fakes(tls=context)
    names["registry.example"] = (PUBLIC, fake)
    fake.serve_image(User="9")
    return fake


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> str:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return str(tmp_path / "ca.pem")


def test_private_authorities(secure: Fake, ca_file: str, names: Names, tmp_path: Path) -> None:
    with Registry() as client, pytest.raises(RegistryUnreachable, match="is not trusted") as caught:
        client.config("registry.example/team/app:1")
    assert "CA" in str(caught.value.hint)
    with Registry(rules=rules()) as client, pytest.raises(RegistryUnreachable, match="is not trusted"):
        client.config(
            "registry.example/team/app:1"
        )  # allowing plain HTTP does not make other certificates trusted
    with Registry(rules=HostRules(ca_files=(ca_file,))) as client:
        assert client.config("registry.example/team/app:1").user == "9"
    names["other.example"] = (PUBLIC, secure)
    with (
        Registry(rules=HostRules(ca_files=(ca_file,))) as client,
        pytest.raises(RegistryUnreachable, match="not trusted"),
    ):
        client.config("other.example/team/app:1")
    with (
        Registry(rules=HostRules(ca_files=(str(tmp_path / "none"),))) as client,
        pytest.raises(ImageError, match="none"),
    ):
        client.config("registry.example/team/app:1")


def test_https_does_not_become_http(
    secure: Fake, ca_file: str, fakes: Callable[..., Fake], names: Names
) -> None:
    plain = fakes()
    names["other.example"] = (PUBLIC, plain)
    trusting = HostRules(ca_files=(ca_file,))
    secure.routes[f"GET {PATH}/manifests/1"] = redirect("http://other.example/x")
    with Registry(rules=trusting) as client, pytest.raises(ImageError, match="from https to http"):
        client.config("registry.example/team/app:1")
    offer = 'Bearer realm="http://other.example/token"'
    secure.routes[f"GET {PATH}/manifests/1"] = Reply(401, {"WWW-Authenticate": offer})
    client = Registry(logins=logins("registry.example"), rules=trusting)
    with client, pytest.raises(RegistryDenied, match="without TLS"):
        client.config("registry.example/team/app:1")
    listed = HostRules(ca_files=(ca_file,), plain=("other.example",))
    with Registry(logins=logins("registry.example"), rules=listed) as client, pytest.raises(RegistryDenied):
        client.config("registry.example/team/app:1")
    assert plain.seen == []


@pytest.fixture
def image(tmp_path: Path) -> Image:
    tree = LayerTree()
    tree.file("hello", "world")
    return assemble([write_layer(tree, tmp_path / "layer")], Settings())


def test_uploads_elsewhere_carry_no_password(fakes: Callable[..., Fake], image: Image) -> None:
    registry, store = fakes(), fakes()
    registry.routes[f"POST {PATH}/blobs/uploads/"] = wants_password(
        Reply(202, {"Location": f"http://{store.host}/put?sig=1"})
    )
    store.routes["PUT /put"] = Reply(201)
    registry.routes[f"PUT {PATH}/manifests/1"] = wants_password(Reply(201))
    with Registry(logins=logins(registry.host, store.host)) as client:
        pushed = client.push(image, f"{registry.host}/team/app:1")
    assert pushed.digest == image.digest == digest(registry.seen[-1].body)
    assert len(store.seen) == 2 and not got_passwords(store)
    assert store.seen[0].path == f"/put?sig=1&digest={image.layers[0].digest.replace(':', '%3A')}"


def test_a_registry_behind_a_proxy_that_ends_tls(secure: Fake, ca_file: str, image: Image) -> None:
    """The registry sees plain HTTP and sends such a location; the upload still uses TLS."""
    secure.routes[f"POST {PATH}/blobs/uploads/"] = Reply(202, {"Location": "http://registry.example/put?x=1"})
    secure.routes["PUT /put"] = Reply(201)
    secure.routes[f"PUT {PATH}/manifests/1"] = Reply(201)
    with Registry(rules=HostRules(ca_files=(ca_file,))) as client:
        client.push(image, "registry.example/team/app:1")
    assert sum(path.startswith("PUT /put?x=1&digest=") for path in secure.paths()) == 2


def test_an_early_refusal_of_a_large_upload_is_read(fake: Fake, tmp_path: Path) -> None:
    """Such a server answers and closes the connection during the upload."""
    tree = LayerTree()
    tree.file("large", random.Random(0).randbytes(16 << 20))
    image = assemble([write_layer(tree, tmp_path / "layer")], Settings())
    listener = socket.create_server(("127.0.0.1", 0))
    location = f"http://127.0.0.1:{listener.getsockname()[1]}/put"
    fake.routes[f"POST {PATH}/blobs/uploads/"] = Reply(202, {"Location": location})

    def refuse() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(1000)
            sock.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    thread = threading.Thread(target=refuse, daemon=True)
    thread.start()
    with listener, Registry() as client, pytest.raises(ImageError, match="answered 413"):
        client.push(image, f"{fake.host}/team/app:1")
    thread.join(10)


class Proxy:
    """An HTTP proxy with CONNECT, which knows the real addresses."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://us%40er:pa%3Ass@127.0.0.1:{self._listener.getsockname()[1]}"
        self.heads: list[str] = []
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(client)
            head = b""
            while not head.endswith(b"\r\n\r\n") and (data := client.recv(1)):
                head += data
            self.heads.append(head.decode())
            if "refused.example" in self.heads[-1]:
                client.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
                continue
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            server = socket.create_connection(("127.0.0.1", self._target))
            self._open.append(server)
            for a, b in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        for sock in self._open:
            sock.close()


@pytest.fixture
def proxy(secure: Fake, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    made = Proxy(secure.port)
    monkeypatch.setenv("HTTPS_PROXY", made.url)
    monkeypatch.setenv("NO_PROXY", "direct.example,127.0.0.1")
    yield made
    made.stop()


def test_proxies(proxy: Proxy, names: Names, ca_file: str) -> None:
    del names["registry.example"]  # only the proxy can resolve this name
    trusting = HostRules(ca_files=(ca_file,))
    with Registry(rules=trusting) as client:
        assert client.config("registry.example/team/app:1").user == "9"
    assert proxy.heads[0].startswith(
        "CONNECT registry.example:443 HTTP/1.1\r\nHost: registry.example:443\r\n"
    )
    assert f"Proxy-Authorization: Basic {base64.b64encode(b'us@er:pa:ss').decode()}\r\n" in proxy.heads[0]
    with Registry(rules=trusting) as client:
        with pytest.raises(RegistryUnreachable, match="403 Forbidden"):
            client.config("refused.example/team/app:1")
        with pytest.raises(Refused):
            client.config("169.254.169.254/team/app:1")
        with pytest.raises(RegistryUnreachable, match="there is no host"):
            client.config("direct.example/team/app:1")
    assert len(proxy.heads) == 2
