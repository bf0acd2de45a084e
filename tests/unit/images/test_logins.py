from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import RegistryDenied, SpecError
from stoker.images import Logins
from stoker.images.logins import Login
from stoker.images.reference import Reference


def auth(pair: str) -> dict[str, str]:
    return {"auth": base64.b64encode(pair.encode()).decode()}


def found(config: dict[str, Any], image: str) -> Login | None:
    return Logins.parse(json.dumps(config)).find(Reference.parse(image))


@pytest.mark.parametrize(
    "key", ["quay.io", "https://quay.io", "https://quay.io/v2/", "quay.io/", "http://quay.io/v1"]
)
def test_spellings_of_a_host(key: str) -> None:
    login = found({"auths": {key: auth("bob:pass:word")}}, "quay.io/x")
    assert login is not None
    assert (login.user, login.password) == ("bob", "pass:word")


@pytest.mark.parametrize("key", ["https://index.docker.io/v1/", "docker.io", "registry-1.docker.io"])
def test_docker_hub(key: str) -> None:
    login = found({"auths": {key: auth("bob:x")}}, "torch")
    assert login is not None and login.user == "bob"


def test_a_login_is_for_its_host_only() -> None:
    config = {"auths": {"quay.io": auth("bob:x"), "quay.io:8443": auth("port:x")}}
    assert found(config, "evil.quay.io/x") is None
    assert found(config, "quay.io.evil.com/x") is None
    assert found(config, "torch") is None
    login = found(config, "quay.io:8443/x")
    assert login is not None and login.user == "port"


def test_the_most_specific_entry_wins() -> None:
    config = {
        "auths": {"quay.io": auth("all:x"), "quay.io/team": auth("team:x"), "quay.io/team/a": auth("a:x")}
    }
    for image, user in (("quay.io/team/a/b", "a"), ("quay.io/team/ab", "team"), ("quay.io/teams/a", "all")):
        login = found(config, image)
        assert login is not None and login.user == user, image


def test_wildcards_of_pull_secrets() -> None:
    config = {"auths": {"*.example.com": auth("star:x"), "a.example.com": auth("a:x")}}
    for image, user in (("a.example.com/x", "a"), ("b.example.com/x", "star")):
        login = found(config, image)
        assert login is not None and login.user == user
    assert found(config, "b.c.example.com/x") is None
    assert found(config, "b.example.com:5000/x") is None


def test_other_shapes_of_an_entry() -> None:
    plain = found({"auths": {"q.io": {"username": "u", "password": "p"}}}, "q.io/x")
    assert plain is not None and (plain.user, plain.password) == ("u", "p")
    token = found({"auths": {"q.io": {**auth("00000000-0000:"), "identitytoken": "refresh"}}}, "q.io/x")
    assert token is not None and token.token == "refresh"
    assert found({"auths": {"q.io": {}}}, "q.io/x") is None
    assert found({}, "q.io/x") is None


def test_secrets_are_not_shown() -> None:
    logins = Logins.parse(json.dumps({"auths": {"q.io": {**auth("bob:hunter2"), "identitytoken": "tok3n"}}}))
    login = logins.find(Reference.parse("q.io/x"))
    shown = f"{logins!r} {login!r} {login.describe() if login else ''}"
    assert "hunter2" not in shown and "tok3n" not in shown and auth("bob:hunter2")["auth"] not in shown


@pytest.mark.parametrize("text", ["", "[", "[]", '{"auths": 1}', '{"credHelpers": [1]}', "[" * 100_000])
def test_damaged_files(text: str) -> None:
    with pytest.raises(SpecError):
        Logins.parse(text)


def test_damaged_entry_is_not_quoted() -> None:
    with pytest.raises(SpecError) as caught:
        found({"auths": {"q.io": {"auth": "hunter2!!"}}}, "q.io/x")
    assert "hunter2" not in str(caught.value)


def test_where_logins_are_read_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Logins.load().find(Reference.parse("q.io/x")) is None
    places = {
        "XDG_CONFIG_HOME": tmp_path / "config/containers/auth.json",
        "DOCKER_CONFIG": tmp_path / "docker/config.json",
        "REGISTRY_AUTH_FILE": tmp_path / "own.json",
    }
    for variable, path in places.items():  # each is read before the previous one
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"auths": {"q.io": auth(f"{variable}:x")}}))
        folder = {"XDG_CONFIG_HOME": path.parents[1], "DOCKER_CONFIG": path.parent}.get(variable, path)
        monkeypatch.setenv(variable, str(folder))
        login = Logins.load().find(Reference.parse("q.io/x"))
        assert login is not None and login.user == variable and login.source == str(path)


def test_an_explicit_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no file with logins"):
        Logins.load(tmp_path / "none.json")


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A credential helper `docker-credential-test`, which records its calls."""
    program = tmp_path / "bin/docker-credential-test"
    program.parent.mkdir()
    program.write_text(
        f"""#!/bin/sh
read host
echo "$# $1 $host" >> {tmp_path}/called
case $host in
  *token*) echo '{{"ServerURL": "x", "Username": "<token>", "Secret": "identity"}}';;
  *none*) echo "credentials not found in native keychain"; exit 1;;
  *broken*) echo "keychain is locked" >&2; exit 1;;
  *odd*) echo "no json";;
  *) echo '{{"ServerURL": "x", "Username": "help", "Secret": "hunter2"}}';;
esac
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path


def with_helpers(config: dict[str, Any]) -> Logins:
    return Logins.parse(json.dumps(config), source="config.json", helpers=True)


def test_helpers(helper: Path) -> None:
    logins = with_helpers(
        {"credHelpers": {"one.io": "test"}, "credsStore": "", "auths": {"two.io": auth("two:x")}}
    )
    one, two = (logins.find(Reference.parse(f"{name}.io/x")) for name in ("one", "two"))
    assert one is not None and (one.user, one.password, one.source) == (
        "help",
        "hunter2",
        "docker-credential-test",
    )
    assert two is not None and two.user == "two"
    assert logins.find(Reference.parse("three.io/x")) is None
    assert (helper / "called").read_text() == "1 get one.io\n"


def test_the_common_helper(helper: Path) -> None:
    logins = with_helpers({"credsStore": "test", "auths": {"any.io": {}}})
    for image, user in (("any.io/x", "help"), ("torch", "help")):
        login = logins.find(Reference.parse(image))
        assert login is not None and login.user == user
    assert "https://index.docker.io/v1/" in (helper / "called").read_text()
    assert logins.find(Reference.parse("none.io/x")) is None
    token = logins.find(Reference.parse("token.io/x"))
    assert token is not None and token.token == "identity" and not token.password


@pytest.mark.parametrize(
    ("host", "said"), [("broken.io", "keychain is locked"), ("odd.io", "did not answer with a login")]
)
@pytest.mark.usefixtures("helper")
def test_helpers_that_fail(host: str, said: str) -> None:
    with pytest.raises(RegistryDenied, match=said):
        with_helpers({"credsStore": "test"}).find(Reference.parse(f"{host}/x"))


def test_a_helper_that_is_not_there() -> None:
    with pytest.raises(RegistryDenied, match="not on the PATH"):
        with_helpers({"credsStore": "surely-not-there"}).find(Reference.parse("q.io/x"))


@pytest.mark.parametrize("name", ["../../tmp/x", "a b", "-x", "x;y", ""])
def test_names_of_helpers(name: str) -> None:
    logins = with_helpers({"credHelpers": {"q.io": name or "/"}})
    with pytest.raises(SpecError, match="not the name of a credential helper"):
        logins.find(Reference.parse("q.io/x"))


def test_pull_secrets_run_no_programs(helper: Path) -> None:
    """A Secret of the cluster must not choose programs that run on this machine."""
    logins = Logins.parse(json.dumps({"credsStore": "test", "credHelpers": {"q.io": "test"}}))
    assert logins.find(Reference.parse("q.io/x")) is None
    assert not (helper / "called").exists()
