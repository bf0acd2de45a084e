"""Kubeconfig files: which one counts, and how mistakes in it are reported."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.engine.kubernetes.api.kubeconfig import KubeConfig, in_cluster
from stoker.errors import SpecError


def write(path: Path, **content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    return path


def entry(kind: str, name: str, **body: Any) -> dict[str, Any]:
    return {"name": name, kind: {key.replace("_", "-"): value for key, value in body.items()}}


def whole(path: Path, user: dict[str, Any] | None = None, **cluster: Any) -> Path:
    return write(
        path,
        **{
            "current-context": "c",
            "contexts": [entry("context", "c", cluster="k", user="u", namespace="team")],
            "clusters": [{"name": "k", "cluster": {"server": "https://k:6443", **cluster}}],
            "users": [{"name": "u", "user": user or {}}],
        },
    )


def test_everything_in_one_file(tmp_path: Path) -> None:
    ca = base64.b64encode(b"authority").decode()
    path = whole(
        tmp_path / "config",
        {"token": "t0p", "as": "someone", "as-groups": ["g1", "g2"], "as-user-extra": {"a/b": ["1"]}},
        **{
            "certificate-authority-data": ca,
            "certificate-authority": "ignored.crt",
            "tls-server-name": "inner",
            "proxy-url": "http://p:secret@proxy:3128",
        },
    )
    config = KubeConfig.load(path)
    assert (config.server, config.namespace, config.context) == ("https://k:6443", "team", "c")
    assert (config.ca, config.ca_file) == (b"authority", None)
    assert (config.tls_server_name, config.proxy_url) == ("inner", "http://p:secret@proxy:3128")
    assert config.user.token == "t0p"
    assert config.user.headers == (
        ("Impersonate-User", "someone"),
        ("Impersonate-Group", "g1"),
        ("Impersonate-Group", "g2"),
        ("Impersonate-Extra-a%2Fb", "1"),
    )
    assert "t0p" not in repr(config) and "secret" not in repr(config)


def test_of_several_files_the_first_with_an_entry_counts(tmp_path: Path) -> None:
    first = write(
        tmp_path / "one",
        contexts=[entry("context", "c", cluster="k", user="u")],
        users=[entry("user", "u", token="first")],
    )
    second = write(
        tmp_path / "two",
        **{
            "current-context": "c",
            "contexts": [entry("context", "c", cluster="other", namespace="second")],
            "clusters": [entry("cluster", "k", server="https://k/")],
            "users": [entry("user", "u", token="second", username="second")],
        },
    )
    missing = tmp_path / "missing"
    env = {"KUBECONFIG": os.pathsep.join(map(str, ("", missing, first, second)))}
    config = KubeConfig.load(env=env)
    assert (config.server, config.namespace) == ("https://k", "default")
    assert (config.user.token, config.user.username) == ("first", "")


def test_default_places(tmp_path: Path) -> None:
    whole(tmp_path / ".kube/config")
    assert KubeConfig.load(env={"HOME": str(tmp_path)}).context == "c"
    with pytest.raises(SpecError, match=r"no kubeconfig at .*nowhere"):
        KubeConfig.load(env={"HOME": str(tmp_path / "nowhere")})
    with pytest.raises(SpecError, match="no kubeconfig at"):
        KubeConfig.load(tmp_path / "no", env={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})


def test_paths_are_relative_to_the_file_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = whole(
        tmp_path / "deep/config",
        {"client-certificate": "c.pem", "client-key": "/abs/k.pem", "tokenFile": "../token"},
        **{"certificate-authority": "ca.pem"},
    )
    monkeypatch.chdir(tmp_path)
    config = KubeConfig.load("deep/config")
    assert config.ca_file == path.parent / "ca.pem"
    assert config.user.cert_file == path.parent / "c.pem"
    assert config.user.key_file == Path("/abs/k.pem")
    assert config.user.token_file == path.parent / "../token"


def test_a_plugin(tmp_path: Path) -> None:
    path = whole(
        tmp_path / "config",
        {
            "exec": {
                "apiVersion": "client.authentication.k8s.io/v1beta1",
                "command": "./bin/get",
                "args": ["a", 1],
                "env": [{"name": "X", "value": "y"}],
                "installHint": "install it\n",
                "interactiveMode": "Never",
                "provideClusterInfo": True,
            }
        },
        extensions=[{"name": "client.authentication.k8s.io/exec", "extension": {"audience": "x"}}],
    )
    config = KubeConfig.load(path)
    plugin = config.user.plugin
    assert plugin is not None
    assert Path(plugin.command) == tmp_path / "bin/get"
    assert (plugin.args, plugin.env, plugin.install_hint) == (("a", "1"), (("X", "y"),), "install it")
    assert plugin.cluster_info and config.plugin_config == {"audience": "x"}


@pytest.mark.parametrize(
    ("user", "cluster", "problem"),
    [
        ({"client-certificate-data": "%%"}, {}, "user u: client-certificate-data is not base64"),
        ({"client-certificate": "a"}, {}, "need each other"),
        ({"token": 5}, {}, "token is not text"),
        ({"auth-provider": {"name": "gcp"}}, {}, "auth-provider is not supported"),
        ({"exec": {"apiVersion": "client.authentication.k8s.io/v1alpha1", "command": "x"}}, {}, "v1alpha1"),
        ({"exec": {"apiVersion": "client.authentication.k8s.io/v1"}}, {}, "command is missing"),
        (
            {
                "exec": {
                    "apiVersion": "client.authentication.k8s.io/v1",
                    "command": "x",
                    "interactiveMode": "Always",
                }
            },
            {},
            "needs a terminal",
        ),
        ({}, {"server": "k:6443"}, "server is not https"),
        ({}, {"server": "https://me:pw@k"}, "server is not https"),
        ({}, {"insecure-skip-tls-verify": "yes"}, "neither true nor false"),
    ],
)
def test_mistakes_are_reported_with_their_file(
    tmp_path: Path, user: dict[str, Any], cluster: dict[str, Any], problem: str
) -> None:
    path = whole(tmp_path / "config", user, **cluster)
    with pytest.raises(SpecError, match=problem) as wrong:
        KubeConfig.load(path)
    assert str(path) in wrong.value.message


def test_unknown_names_come_with_the_known_ones(tmp_path: Path) -> None:
    path = whole(tmp_path / "config")
    with pytest.raises(SpecError, match="no context 'x'") as wrong:
        KubeConfig.load(path, "x")
    assert wrong.value.hint == "There are: c."
    bare = write(tmp_path / "bare", contexts=[entry("context", "a"), entry("context", "b")])
    with pytest.raises(SpecError, match="no current context") as wrong:
        KubeConfig.load(bare)
    assert wrong.value.hint == "Name one of: a, b."


@pytest.mark.parametrize(
    "content", ["a: [b", "token: !!python/object:os.system x", "- just\n- a list", "\x00"]
)
def test_other_files_are_refused_without_quoting_them(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config"
    path.write_text(f"{content}\n# s3cret")
    with pytest.raises(SpecError, match=r"not YAML|not a mapping") as wrong:
        KubeConfig.load(path)
    assert "s3cret" not in wrong.value.message and "system" not in wrong.value.message


def test_inside_a_pod(tmp_path: Path) -> None:
    for name, content in {"token": "t\n", "ca.crt": "authority", "namespace": "team\n"}.items():
        (tmp_path / name).write_text(content)
    env = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    config = in_cluster(env, tmp_path)
    assert (config.server, config.namespace) == ("https://[fd00::1]:6443", "team")
    assert (config.user.token_file, config.ca_file) == (tmp_path / "token", tmp_path / "ca.crt")
    with pytest.raises(SpecError, match="KUBERNETES_SERVICE_HOST is unset"):
        KubeConfig.load("in-cluster", env={})
