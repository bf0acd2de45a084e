"""Manifests that are sent to a cluster, compared as a whole, and invariants of every attempt."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.engine.base import Attempt, TaskPlan
from stoker.engine.kubernetes import names
from stoker.engine.kubernetes.config import ClusterConfig
from stoker.engine.kubernetes.manifests.pod import NOT_SHOWN, PLACEHOLDERS, bundle, image_of, render, to_yaml
from stoker.errors import EngineError, Refused
from stoker.spec import Job
from support.kubernetes.render_cases import CASES, KEYS, MANIFESTS, ORIGIN, readable

LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
VALUE = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")


@pytest.mark.parametrize("name", CASES)
def test_manifests_are_as_reviewed(name: str) -> None:
    kept = list(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text()))
    assert readable(CASES[name].objects()) == kept


def test_every_kept_manifest_is_of_a_case() -> None:
    assert {path.stem for path in MANIFESTS.glob("*.yaml")} == set(CASES)


# -- invariants of every attempt -----------------------------------------------------------------------------

slugs = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True)
texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=40)
tokens = st.text(string.ascii_letters + string.digits, min_size=20, max_size=40)
jobs = st.fixed_dictionaries(
    {"run": st.lists(texts.filter(str.strip), min_size=1, max_size=4)},
    optional={
        "resources": st.fixed_dictionaries(
            {},
            optional={
                "cpu": st.floats(0.01, 64),
                "memory": st.integers(1 << 20, 1 << 40),
                "gpu": st.integers(0, 16),
                "shm": st.integers(1 << 20, 1 << 36),
                "disk": st.integers(1 << 20, 1 << 40),
            },
        ),
        "env": st.dictionaries(st.from_regex(r"[A-RT-Z_][A-Z0-9_]{0,20}", fullmatch=True), texts, max_size=3),
        "launcher": st.sampled_from(["auto", "none"]),
        "priority": st.integers(-1000, 1000),
        "grace": st.floats(0, 3600),
        "inputs": st.dictionaries(
            st.from_regex(r"[a-z][a-z0-9]{0,10}", fullmatch=True),
            st.sampled_from(["pvc://a", "pvc://b/c/d"]),
            max_size=3,
        ),
        "python": st.just("/opt/python $(x)"),
    },
)
configs = st.fixed_dictionaries(
    {},
    optional={
        "stoker_image": st.just("registry.example.com/stoker:1"),
        "security": st.sampled_from(["restricted", "baseline"]),
        "user": st.sampled_from(["image", "platform", 0, 1234]),
        "read_only_root": st.booleans(),
        "checkpoints": st.just("checkpoints"),
        "pull_secrets": st.just(["a", "b"]),
        "rdma": st.just({"resource": "rdma/hca", "capability": True}),
        "sidecar": st.sampled_from([{"memory": "64Mi"}, {"cpu_limit": 0.5}]),
        "priority_classes": st.just({"low": "low", "high": "high"}),
        "labels": st.just({"team": "a"}),
    },
)
images = st.fixed_dictionaries(
    {}, optional={"user": st.sampled_from(["", "0", "root", "app", "1001", "1001:5", "app:users"])}
)


@st.composite
def attempts(draw: st.DrawFn) -> tuple[Attempt, ClusterConfig]:
    raw = draw(jobs)
    secrets = {f"S_{number}": draw(tokens) for number in range(draw(st.integers(0, 3)))}
    job = Job.from_json({"image": "torch:2.9", "name": draw(slugs), **raw, "secrets": list(secrets)})
    run = f"{job.name}-{draw(st.from_regex(r'[a-z0-9]{4}', fullmatch=True))}"
    role = draw(slugs)
    gpus = tuple(f"g{number}" for number in range(job.resources.gpu))
    plans = tuple(
        TaskPlan(
            f"{role}-{index}",
            role=role,
            index=index,
            incarnation=draw(st.integers(1, 3)),
            node=draw(st.sampled_from(["node-1", "new:a:1", "local", "x.y-z"])),
            cpu=job.resources.cpu,
            memory=job.resources.memory,
            gpus=gpus,
        )
        for index in range(draw(st.integers(1, 3)))
    )
    labels = {"name": job.name, "user": draw(texts), "project": draw(slugs)}
    attempt = Attempt(run, draw(st.integers(1, 9999)), plans, job, secrets, draw(images), labels)
    return attempt, ClusterConfig.from_json(draw(configs))


few = settings(max_examples=40)


def containers(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    spec = pod["spec"]
    return {one["name"]: one for one in [*spec.get("initContainers", []), *spec["containers"]]}


@few
@given(attempts())
def test_names_and_labels_are_valid_unique_and_the_same_again(given: tuple[Attempt, ClusterConfig]) -> None:
    attempt, config = given
    objects = render(attempt, config, KEYS, ORIGIN)
    assert objects == render(attempt, config, KEYS, ORIGIN)
    found = [obj["metadata"]["name"] for obj in objects]
    assert len(set(found)) == len(found)
    for obj in objects:
        assert LABEL.fullmatch(obj["metadata"]["name"])
        for key, value in obj["metadata"]["labels"].items():
            assert VALUE.fullmatch(value) and len(value) <= 63, (key, value)
        assert all(isinstance(value, str) for value in obj["metadata"]["annotations"].values())
    for plan, pod in zip(attempt.tasks, objects[1:], strict=True):
        assert names.key_of(pod) == (attempt.run, attempt.number, plan.name)
        assert names.incarnation_of(pod) == plan.incarnation


@few
@given(attempts())
def test_nothing_secret_is_in_a_pod_and_no_key_to_the_cluster(given: tuple[Attempt, ClusterConfig]) -> None:
    attempt, config = given
    for pod in render(attempt, config, KEYS, ORIGIN)[1:]:
        text = json.dumps(pod)
        assert not any(value in text for value in attempt.secrets.values())
        assert "certificate" not in text and "kkkk" not in text
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert not any("projected" in volume or "hostPath" in volume for volume in spec["volumes"])
        mounted = {
            name: {mount["name"] for mount in one.get("volumeMounts", [])}
            for name, one in containers(pod).items()
        }
        for volume, owner in (("key", "courier"), ("order", "init"), ("secrets", "main")):
            assert {name for name, found in mounted.items() if volume in found} <= {owner}
    shown = to_yaml(render(attempt, config, KEYS, ORIGIN))
    assert not any(value in shown for value in attempt.secrets.values())


@few
@given(attempts())
def test_pods_are_whole(given: tuple[Attempt, ClusterConfig]) -> None:
    attempt, config = given
    secret, *pods = render(attempt, config, KEYS, ORIGIN)
    for pod in pods:
        spec = pod["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert len(volumes) == len(spec["volumes"])
        for one in containers(pod).values():
            mounts = one.get("volumeMounts", [])
            assert all(mount["name"] in volumes for mount in mounts)
            assert all(count == 1 for count in Counter(mount["mountPath"] for mount in mounts).values())
            for variable in one.get("env", []):
                assert ("value" in variable) != ("valueFrom" in variable)
        used = {mount["name"] for one in containers(pod).values() for mount in one.get("volumeMounts", [])}
        assert set(volumes) == used, "no unused volume"
        for volume in volumes.values():
            for item in volume.get("secret", {}).get("items", []):
                assert item["key"] in secret["data"]
        assert len(json.dumps(pod)) < 100_000


@few
@given(attempts())
def test_the_courier_has_its_reservation_and_all_containers_are_restricted(
    given: tuple[Attempt, ClusterConfig],
) -> None:
    attempt, config = given
    for pod in render(attempt, config, KEYS, ORIGIN)[1:]:
        found = containers(pod)
        if "courier" in found:
            resources = found["courier"]["resources"]
            assert resources["requests"]["memory"] == resources["limits"]["memory"]
            assert resources["limits"].get("cpu") == ("500m" if config.sidecar.cpu_limit else None)
        main = found["main"]["resources"]
        wanted = attempt.tasks[0]
        assert ("memory" in main.get("limits", {})) == (wanted.memory is not None)
        assert main["requests"].get("memory") == main.get("limits", {}).get("memory")
        assert ("cpu" in main.get("limits", {})) == (wanted.cpu is not None)
        if config.security != "restricted":
            continue
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True and context["seccompProfile"] == {"type": "RuntimeDefault"}
        if config.user == "image":
            assert context["runAsUser"] > 0
        for name, one in found.items():
            assert one["securityContext"]["allowPrivilegeEscalation"] is False
            capabilities = one["securityContext"]["capabilities"]
            assert capabilities["drop"] == ["ALL"]
            assert "add" not in capabilities or (name == "main" and config.rdma is not None)


@few
@given(attempts())
def test_what_the_user_wrote_is_in_no_shell(given: tuple[Attempt, ClusterConfig]) -> None:
    attempt, config = given
    assert attempt.job is not None
    for pod in render(attempt, config, KEYS, ORIGIN)[1:]:
        main = containers(pod)["main"]
        if attempt.job.launcher == "none":
            assert [word.replace("$$", "$") for word in main["command"]] == attempt.job.argv()
        else:
            assert all(word not in main["command"] for word in attempt.job.argv() if len(word) > 12)
        for one in containers(pod).values():
            assert all("$(" not in word.replace("$$", "") for word in one.get("command", []))


# -- single points ---------------------------------------------------------------------------------------------


def test_names_that_lead_elsewhere_are_refused() -> None:
    for name in ("../x", "a/b", "", "a.b", "x" * 64, "-a", "a b"):
        with pytest.raises(EngineError):
            render(Attempt(name, 1, (TaskPlan("worker-0"),)), ClusterConfig(), KEYS, ORIGIN)


def test_long_names_stay_different() -> None:
    long = "x" * 60
    found = {names.pod_name(long, 1, f"worker-{number}", 1) for number in range(100)}
    assert len(found) == 100 and all(LABEL.fullmatch(name) for name in found)
    assert names.pod_name("a", 1, "worker-0", 2) == "a-1-worker-0-r2"
    assert names.pod_name("Aa", 1, "w_0", 1) != names.pod_name("aa", 1, "w-0", 1)


def test_without_any_image_it_is_refused() -> None:
    attempt = Attempt("a-1", 1, (TaskPlan("worker-0"),), Job.from_json({"run": "x"}))
    with pytest.raises(Refused, match="no image"):
        image_of(attempt, ClusterConfig())
    assert image_of(attempt, ClusterConfig(default_image="a:1")) == "a:1"


def test_a_dry_run_shows_no_secret_and_reads_back() -> None:
    case = CASES["gpu"]
    config = ClusterConfig.from_json(case.config)
    text = to_yaml(render(case.attempt(), config, PLACEHOLDERS, ORIGIN))
    secret, pod = yaml.safe_load_all(text)
    assert set(secret["stringData"].values()) == {NOT_SHOWN}
    assert pod == case.objects()[1]


def test_the_bundle_is_named_by_its_content_and_never_changes() -> None:
    found = bundle(b"zip", "0123")
    assert found["immutable"] is True and found["metadata"]["name"] == "stoker-bundle-0123"
    assert found["binaryData"] == {"bundle.zip": "emlw"}
