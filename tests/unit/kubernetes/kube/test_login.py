"""Credentials that change at run time: tokens, files, certificates, plugins."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme

from stoker.engine.kubernetes.api import credentials, exec_plugin, kinds
from stoker.engine.kubernetes.api.client import Kube
from stoker.engine.kubernetes.api.errors import KubeUnavailable
from stoker.engine.kubernetes.api.kubeconfig import KubeConfig
from support.kubernetes.kubeapi import Api, kubeconfig, talking
from support.processes import alive
from support.waiting import wait_async


@pytest.fixture(autouse=True)
def look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "CHECK_SECONDS", 0.0)


def test_a_token_and_a_password(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        for user, accepted in (({"token": "t"}, "t"), ({"username": "me", "password": "pw"}, "me:pw")):
            api = Api(ca, tokens={accepted})
            async with talking(tmp_path / "config", api, user) as (_, kube):
                await kube.version()

    asyncio.run(story())


def test_refused_credentials_are_unavailable_and_not_shown(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        api = Api(ca, tokens={"other"})
        async with talking(tmp_path / "config", api, {"token": "hunter2"}) as (_, kube):
            with pytest.raises(KubeUnavailable, match="does not accept the credentials") as refused:
                await kube.get(kinds.PODS, "a")
            assert refused.value.status == 401
            assert "hunter2" not in f"{refused.value!r}{refused.value.hint}{refused.value.to_json()}"
            assert len(api.seen) == 1

    asyncio.run(story())


def test_a_token_file_is_read_again_when_it_changes(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        file = tmp_path / "token"
        file.write_text("one\n")
        api = Api(ca, tokens={"one"})
        async with talking(tmp_path / "config", api, {"tokenFile": "token", "token": "stale"}) as (_, kube):
            await kube.version()
            replace(file, "two")
            api.tokens = {"two"}
            await kube.version()
            assert len(api.seen) == 2, "no request was refused on the way"
            file.write_text("")
            await kube.version()
            file.unlink()
            await kube.version()

    asyncio.run(story())


def test_a_refused_token_is_read_again_from_its_file_and_the_kubeconfig(
    tmp_path: Path, ca: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "CHECK_SECONDS", 3600.0)

    async def story() -> None:
        file = tmp_path / "token"
        file.write_text("one")
        api = Api(ca, tokens={"one"})
        async with talking(tmp_path / "config", api, {"tokenFile": "token"}) as (_, kube):
            await kube.version()
            file.write_text("two")
            api.tokens = {"two"}
            await kube.version()
            kubeconfig(tmp_path / "config", api.url, ca, {"token": "three"})
            api.tokens = {"three"}
            await kube.create(kinds.PODS, {"metadata": {"name": "a"}})
            assert [seen.method for seen in api.seen] == ["GET", "GET", "GET", "POST", "POST"]

    asyncio.run(story())


def test_a_missing_token_file_is_named(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        async with talking(tmp_path / "config", Api(ca), {"tokenFile": "gone"}) as (_, kube):
            with pytest.raises(KubeUnavailable, match=r"no credentials in .*/gone: No such file"):
                await kube.version()

    asyncio.run(story())


def replace(path: Path, content: str | bytes) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content.encode() if isinstance(content, str) else content)
    fresh.replace(path)


def pair(ca: trustme.CA, name: str) -> tuple[bytes, bytes]:
    made = ca.issue_cert(f"{name}@test", common_name=name)
    return b"".join(part.bytes() for part in made.cert_chain_pems), made.private_key_pem.bytes()


def test_client_certificates_inline_and_from_files_that_change(tmp_path: Path, ca: trustme.CA) -> None:
    import base64

    async def story() -> None:
        cert, key = pair(ca, "alice")
        inline = {
            "client-certificate-data": base64.b64encode(cert).decode(),
            "client-key-data": base64.b64encode(key).decode(),
        }
        api = Api(ca, certificates={"alice"})
        async with talking(tmp_path / "config", api, inline) as (_, kube):
            await kube.version()
            assert [seen.certificate for seen in api.seen] == ["alice"]

        (tmp_path / "c.pem").write_bytes(cert)
        (tmp_path / "k.pem").write_bytes(key)
        api = Api(ca, certificates={"alice"})
        async with talking(
            tmp_path / "config", api, {"client-certificate": "c.pem", "client-key": "k.pem"}
        ) as (_, kube):
            await kube.version()
            cert, key = pair(ca, "bob")
            replace(tmp_path / "c.pem", cert)
            await kube.version()  # certificate and key do not match yet
            replace(tmp_path / "k.pem", key)
            api.certificates = {"bob"}
            await kube.version()
            await kube.version()
            assert [seen.certificate for seen in api.seen] == ["alice", "alice", "bob", "bob"]
            assert api.connections == 2

    asyncio.run(story())


def test_an_encrypted_key_is_refused_without_a_prompt(tmp_path: Path, ca: trustme.CA) -> None:
    from cryptography.hazmat.primitives import serialization

    async def story() -> None:
        cert, key = pair(ca, "alice")
        loaded = serialization.load_pem_private_key(key, None)
        locked = loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"pw"),
        )
        (tmp_path / "c.pem").write_bytes(cert)
        (tmp_path / "k.pem").write_bytes(locked)
        user = {"client-certificate": "c.pem", "client-key": "k.pem"}
        async with talking(tmp_path / "config", Api(ca), user) as (_, kube):
            with pytest.raises(KubeUnavailable, match="cannot be used"):
                await kube.version()

    asyncio.run(story())


def test_only_the_named_authority_is_trusted_and_it_may_change(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        other = trustme.CA()
        authority = tmp_path / "ca.pem"
        authority.write_bytes(other.cert_pem.bytes())
        api = Api(ca)
        await api.start()
        path = kubeconfig(tmp_path / "config", api.url, None, {}, **{"certificate-authority": "ca.pem"})
        kube = Kube.from_config(KubeConfig.load(path))
        with pytest.raises(KubeUnavailable, match=r"is not trusted: .*(issuer|certificate)"):
            await kube.version()
        assert api.seen == []
        replace(authority, ca.cert_pem.bytes())
        await kube.version()
        await kube.close()
        await api.stop()

    asyncio.run(story())


def test_the_name_in_the_certificate_is_checked(
    tmp_path: Path, ca: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        api = Api(ca, name="inner.test")
        async with talking(tmp_path / "config", api, {}, cluster={"tls-server-name": "inner.test"}) as (
            _,
            kube,
        ):
            await kube.version()
            assert api.seen[0].sni == "inner.test"
        async with talking(tmp_path / "config", api, {}, cluster={"tls-server-name": "other.test"}) as (
            _,
            kube,
        ):
            with pytest.raises(KubeUnavailable, match=r"not trusted: .*other\.test"):
                await kube.version()
        insecure = {"tls-server-name": "other.test", "insecure-skip-tls-verify": True}
        async with talking(tmp_path / "config", api, {}, cluster=insecure) as (_, kube):
            with caplog.at_level(logging.WARNING):
                await kube.version()

    asyncio.run(story())
    assert "insecure-skip-tls-verify" in caplog.text


# -- plugins


PLUGIN = """\
import json, os, pathlib, sys, time
here = pathlib.Path({here!r})
count = len(list(here.glob("run-*")))
(here / f"run-{{count}}").write_text(os.environ["KUBERNETES_EXEC_INFO"])
(here / "env").write_text(json.dumps([sys.argv[1:], os.environ.get("EXTRA"), sys.stdin.read()]))
exec((here / "body").read_text())
"""


class Program:
    """A plugin with a behaviour that the test may change; `count` is the number of the call."""

    def __init__(self, directory: Path, body: str) -> None:
        self.directory = directory
        self.script = directory / "plugin.py"
        self.script.write_text(PLUGIN.format(here=str(directory)))
        self.body(body)

    def body(self, text: str) -> None:
        (self.directory / "body").write_text(text)

    @property
    def runs(self) -> int:
        return len(list(self.directory.glob("run-*")))

    def user(self, version: str = "v1", **more: Any) -> dict[str, Any]:
        return {
            "exec": {
                "apiVersion": f"client.authentication.k8s.io/{version}",
                "command": sys.executable,
                "args": [str(self.script), "an arg"],
                "env": [{"name": "EXTRA", "value": "extra"}],
                "installHint": "get it at the shop",
                "interactiveMode": "Never",
                **more,
            }
        }


def prints(version: str = "v1", **status: Any) -> str:
    answer = {
        "kind": "ExecCredential",
        "apiVersion": f"client.authentication.k8s.io/{version}",
        "status": status,
    }
    return f"print({json.dumps(json.dumps(answer))}.replace('COUNT', str(count)))"


def expiring(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_plugin_is_run_once_with_the_documented_input(tmp_path: Path, ca: trustme.CA, version: str) -> None:
    async def story() -> None:
        program = Program(tmp_path, prints(version, token="token-COUNT", expirationTimestamp=expiring(3600)))
        api = Api(ca, tokens={"token-0"})
        user = program.user(version, provideClusterInfo=True)
        async with talking(tmp_path / "config", api, user) as (_, kube):
            await asyncio.gather(*(kube.version() for _ in range(20)))
        assert program.runs == 1
        told = json.loads((tmp_path / "run-0").read_text())
        assert told["apiVersion"] == f"client.authentication.k8s.io/{version}"
        assert told["spec"]["interactive"] is False
        assert told["spec"]["cluster"]["server"] == api.url
        assert json.loads((tmp_path / "env").read_text()) == [["an arg"], "extra", ""]

    asyncio.run(story())


def test_a_plugin_is_run_again_before_its_token_expires(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        program = Program(tmp_path, prints(token="token-COUNT", expirationTimestamp=expiring(3)))
        api = Api(ca, tokens={"token-0"})
        async with talking(tmp_path / "config", api, program.user()) as (_, kube):
            await kube.version()
            program.body(prints(token="token-COUNT", expirationTimestamp=expiring(3600)))
            api.tokens = {"token-0", "token-1"}
            while program.runs < 2:
                await kube.version()
                await asyncio.sleep(0.1)
            await kube.version()
            assert api.seen[-1].headers["Authorization"] == "Bearer token-1"
            assert program.runs == 2

    asyncio.run(story())


def test_a_plugin_is_run_again_when_its_token_is_refused(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        program = Program(tmp_path, prints(token="token-COUNT"))
        api = Api(ca, tokens={"token-0"})
        async with talking(tmp_path / "config", api, program.user()) as (_, kube):
            await kube.version()
            api.tokens = {"token-1"}
            await asyncio.gather(
                *(kube.create(kinds.PODS, {"metadata": {"name": f"p{n}"}}) for n in range(8))
            )
            assert program.runs == 2
            program.body(prints(token="always-the-same"))
            with pytest.raises(KubeUnavailable, match="does not accept") as refused:
                api.tokens = set()
                await kube.version()
            assert refused.value.hint and "Log in again" in refused.value.hint

    asyncio.run(story())


def test_a_plugin_may_give_a_client_certificate(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        cert, key = pair(ca, "carol")
        program = Program(
            tmp_path, prints(clientCertificateData=cert.decode(), clientKeyData=key.decode(), token="t")
        )
        api = Api(ca, certificates={"carol"})
        async with talking(tmp_path / "config", api, program.user()) as (_, kube):
            await kube.version()
            assert (api.seen[0].certificate, api.seen[0].headers["Authorization"]) == ("carol", "Bearer t")
            cert, key = pair(ca, "dave")
            program.body(prints(clientCertificateData=cert.decode(), clientKeyData=key.decode()))
            api.certificates = {"dave"}
            await kube.version()
            assert [seen.certificate for seen in api.seen] == ["carol", "carol", "dave"]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("sys.exit('please\\n log in')", "ended with 1: please log in"),
        ("print('{')", "printed no valid ExecCredential"),
        (prints(), "printed no valid ExecCredential"),
        (prints(token="s3cret", expirationTimestamp="soon"), "printed no valid ExecCredential"),
        (prints(clientCertificateData="s3cret"), "printed no valid ExecCredential"),
        (prints("v1beta1", token="s3cret"), "printed no ExecCredential of client.authentication.k8s.io/v1"),
        ("print('x' * 2_000_000)", "printed 2000001 bytes"),
    ],
)
def test_a_plugin_that_fails_is_quoted_with_its_hint(
    tmp_path: Path, ca: trustme.CA, body: str, problem: str
) -> None:
    async def story() -> None:
        program = Program(tmp_path, body)
        api = Api(ca, tokens=set())
        async with talking(tmp_path / "config", api, program.user()) as (_, kube):
            with pytest.raises(KubeUnavailable, match=problem) as failed:
                await kube.version()
            assert failed.value.hint == "get it at the shop"
            assert "s3cret" not in failed.value.message
            with pytest.raises(KubeUnavailable, match=problem):
                await kube.version()
            assert program.runs == 1, "a failing plugin is not run for every request"
            assert api.seen == []

    asyncio.run(story())


def test_a_missing_plugin_shows_how_to_install_it(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        user = Program(tmp_path, "").user(command="no-such-plugin")
        async with talking(tmp_path / "config", Api(ca), user) as (_, kube):
            with pytest.raises(KubeUnavailable, match="`no-such-plugin`: No such file") as failed:
                await kube.version()
            assert failed.value.hint == "get it at the shop"

    asyncio.run(story())


def test_a_plugin_that_hangs_is_ended_with_what_it_started(tmp_path: Path, ca: trustme.CA) -> None:
    async def story() -> None:
        program = Program(
            tmp_path,
            "import subprocess\n"
            "child = subprocess.Popen(['sleep', '3600'])\n"
            "(here / 'child').write_text(str(child.pid))\n"
            "child.wait()",
        )
        config = KubeConfig.load(kubeconfig(tmp_path / "config", "https://k", ca, program.user()))
        assert config.user.plugin is not None
        hanging = exec_plugin.PluginLogin(config, config.user.plugin, timeout=3)
        with pytest.raises(KubeUnavailable, match="did not end within 3 s"):
            await hanging.identity()
        child = int((tmp_path / "child").read_text())
        await wait_async(lambda: not alive(child))

    asyncio.run(story())


def test_credentials_that_cannot_be_renewed_are_used_until_they_expire(
    tmp_path: Path, ca: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        program = Program(tmp_path, prints(token="token-COUNT", expirationTimestamp=expiring(3600)))
        config = KubeConfig.load(kubeconfig(tmp_path / "config", "https://k", ca, program.user()))
        assert config.user.plugin is not None
        asked = exec_plugin.PluginLogin(config, config.user.plugin)
        first = await asked.identity()
        program.body("sys.exit('offline')")
        began = time.time()
        monkeypatch.setattr(exec_plugin.time, "time", lambda: began + 3590)
        assert await asked.identity() == first
        assert program.runs == 2
        monkeypatch.setattr(exec_plugin.time, "time", lambda: began + 3700)
        with pytest.raises(KubeUnavailable, match="offline"):
            await asked.identity()

    asyncio.run(story())


def test_closing_ends_a_plugin_that_runs_and_a_cancelled_caller_does_not(
    tmp_path: Path, ca: trustme.CA
) -> None:
    async def story() -> None:
        program = Program(tmp_path, "(here / 'pid').write_text(str(os.getpid()))\ntime.sleep(3600)")
        async with talking(tmp_path / "config", Api(ca), program.user()) as (_, kube):
            asking = [asyncio.create_task(kube.version()) for _ in range(2)]
            await wait_async(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
            asking[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking[0]
            pid = int((tmp_path / "pid").read_text())
            os.kill(pid, 0)
            assert program.runs == 1
            await kube.close()
            assert not alive(pid)
            with pytest.raises(KubeUnavailable, match="closed"):
                await asking[1]
            with pytest.raises(KubeUnavailable, match="closed"):
                await kube.version()
        gc.collect()

    asyncio.run(story())
