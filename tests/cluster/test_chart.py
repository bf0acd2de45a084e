"""The chart without a cluster: rendered output, and refused values. STOKER_GOLDEN=write writes the files."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_parts import CHART, helm, merged, objects, rendered

from stoker.engine.kubernetes.config import ClusterConfig, changed
from stoker.settings import Home, Settings

GOLDEN = Path(__file__).parent / "golden/chart"

LEAST: dict[str, Any] = {
    "image": {"repository": "registry.example.com/stoker"},
    "token": {"existingSecret": "stoker-token"},
}
POSTGRESQL = {
    "database": {"kind": "postgresql", "existingSecret": "stoker-database"},
    "replicas": 2,
}
EVERYTHING = {
    "fullnameOverride": "trainer",
    "image": {"digest": f"sha256:{'0' * 64}", "pullSecrets": ["regcred"], "pullPolicy": "Always"},
    "token": {"key": "password"},
    "database": {"kind": "postgresql", "existingSecret": "database", "key": "uri"},
    "replicas": 3,
    "persistence": {"existingClaim": "shared"},
    "cluster": {
        "name": "gpu-prod",
        "defaultImage": "registry.example.com/torch:2.9",
        "stokerImage": "none",
        "pools": {
            "a100": {"selector": {"gpu": "a100"}, "tolerations": ["gpu=a100:NoSchedule"]},
            "spot": {
                "selector": {"spot": "yes"},
                "autoscale": {"max_nodes": 8, "cpu": 16, "memory": "64Gi", "gpu": 1},
            },
        },
        "settings": {"start_deadline": "20m", "default_cpu": 0.5, "reach": "direct"},
    },
    "runs": {
        "namespace": "training-runs",
        "createNamespace": True,
        "pullSecrets": ["teamcred"],
        "projects": ["default", "vision"],
        "blockDrains": True,
    },
    "serviceAccount": {"name": "trainer-server", "annotations": {"example.com/role": "trainer"}},
    "rbac": {"pods": True},
    "networkPolicy": {
        "server": {
            "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}]
        },
        "runs": {
            "courierFrom": [{"ipBlock": {"cidr": "192.0.2.0/24"}}],
            "egress": [{"to": [{"ipBlock": {"cidr": "198.51.100.0/24"}}], "ports": [{"port": 443}]}],
        },
    },
    "service": {"type": "LoadBalancer", "port": 8080, "annotations": {"example.com/internal": "true"}},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "host": "stoker.example.com",
        "tlsSecret": "stoker-tls",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "3600"},
    },
    "config": {
        "server": {"lease": 5.5},
        "logs": {"budget": 1073741824},
        "control": {"backup_every": 600},
        "images": {"plain": ["registry:5000"]},
    },
    "allowedHosts": ["trainer.lab"],
    "clusterDomain": "k8s.lab",
    "nodeSelector": {"role": "system"},
    "tolerations": [{"key": "system", "operator": "Exists"}],
    "priorityClassName": "system-cluster-critical",
    "podAnnotations": {"example.com/scrape": "no"},
    "podLabels": {"team": "ml"},
}
BARE = {
    "persistence": {"keep": False, "accessMode": "ReadWriteOncePod", "storageClass": "fast", "size": "1Ti"},
    "serviceAccount": {"create": False, "name": "given"},
    "rbac": {"create": False},
    "networkPolicy": {"enabled": False},
    "runs": {"namespace": "elsewhere"},
    "platformAssignsUser": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "least": LEAST,
    "postgresql": merged(LEAST, POSTGRESQL),
    "everything": merged(LEAST, EVERYTHING),
    "bare": merged(LEAST, BARE),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_lint_finds_nothing(name):
    done = helm("lint", "--strict", CHART, "-f", "-", input=yaml.safe_dump(VARIANTS[name]))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", VARIANTS)
def test_the_rendered_chart_equals_its_golden_file(name):
    """A change of the chart shows as a difference in these files."""
    made, file = rendered(VARIANTS[name]), GOLDEN / f"{name}.yaml"
    if os.environ.get("STOKER_GOLDEN") == "write":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(made)
    assert made == file.read_text()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_notes_say_what_to_do_next(name):
    """`helm template` does not print the notes; a dry run does."""
    done = helm(
        "install",
        "stoker",
        CHART,
        "-n",
        "training",
        "--dry-run=client",
        "-f",
        "-",
        input=yaml.safe_dump(VARIANTS[name]),
    )
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    values = VARIANTS[name]
    assert "export STOKER_URL=http" in notes
    assert f"get secret {values['token']['existingSecret']} " in notes
    assert f"stoker cluster check {values.get('cluster', {}).get('name', 'main')}" in notes
    assert ("0/1 for the others" in notes) == (values.get("replicas", 1) > 1)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_server_reads_its_configuration(name, tmp_path):
    config = next(one for one in objects(rendered(VARIANTS[name])) if one["kind"] == "ConfigMap")
    (tmp_path / "config.toml").write_text(config["data"]["config.toml"])
    settings = Settings.load(Home(tmp_path))
    assert (settings.server.host, settings.server.port) == ("0.0.0.0", 7380)
    assert "stoker.training.svc" in settings.server.allowed_hosts or name == "everything"
    if name == "everything":
        assert tomllib.loads(config["data"]["config.toml"])["logs"] == {"budget": 1 << 30}
        assert settings.server.cluster == "gpu-prod"
        assert settings.server.allowed_hosts == (
            "trainer",
            "trainer.training",
            "trainer.training.svc",
            "trainer.training.svc.k8s.lab",
            "stoker.example.com",
            "trainer.lab",
        )


@pytest.mark.parametrize("name", VARIANTS)
def test_the_server_takes_the_settings_of_its_cluster(name):
    config = next(one for one in objects(rendered(VARIANTS[name])) if one["kind"] == "ConfigMap")
    lines = [line for line in config["data"]["cluster"].splitlines() if line]
    found = changed(ClusterConfig(), lines)
    assert found.kubeconfig == "in-cluster"
    if name == "everything":
        assert (found.namespace, found.stoker_image, found.start_deadline) == ("training-runs", "", 1200)
        assert found.pools["spot"].autoscale is not None
    else:
        assert found.stoker_image == "registry.example.com/stoker:0.1.0"


def prepare(name: str, folder: Path, token: str) -> subprocess.CompletedProcess[str]:
    """Run the init container's script, with its mounts below this folder."""
    config = next(one for one in objects(rendered(VARIANTS[name])) if one["kind"] == "ConfigMap")
    for file, text in config["data"].items():
        (folder / "config").mkdir(exist_ok=True)
        (folder / "config" / file).write_text(text.replace("/etc/stoker", str(folder)))
    (folder / "token").mkdir(exist_ok=True)
    (folder / "token/token").write_text(token)
    (folder / "home").mkdir(exist_ok=True)
    env = {"PATH": os.environ["PATH"], "STOKER_HOME": str(folder / "home"), "HOSTNAME": "stoker-1"}
    argv = ["sh", str(folder / "config/prepare")]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", ["least", "postgresql"])
def test_the_home_is_prepared_with_the_token_that_was_chosen(name, tmp_path):
    for _ in range(2):
        assert prepare(name, tmp_path, "x" * 24).returncode == 0
    home = Home(tmp_path / "home")
    assert home.token.read_text() == "x" * 24 + "\n"
    assert home.token.stat().st_mode & 0o777 == 0o600
    assert Settings.load(home).server.port == 7380
    assert sorted(path.name for path in home.root.iterdir()) == ["config.toml", "token"]


def test_an_invalid_token_is_refused_before_the_server_starts(tmp_path):
    for token in ("", "\n", "short"):
        done = prepare("least", tmp_path, token)
        assert done.returncode == 1
        assert "stoker-token" in done.stderr
        assert list((tmp_path / "home").iterdir()) == []


def test_leftovers_of_servers_are_removed_after_a_week(tmp_path):
    prepare("postgresql", tmp_path, "x" * 24)
    home, old = tmp_path / "home", time.time() - 8 * 86400
    for name in ("gone", "held", "fresh"):
        for end in ("lock", "log", "log.1"):
            (home / f"server-{name}.{end}").touch()
            os.utime(home / f"server-{name}.{end}", (old, old))
    os.utime(home / "server-fresh.log")
    with open(home / "server-held.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert prepare("postgresql", tmp_path, "x" * 24).returncode == 0
    left = {path.name.split(".")[0] for path in home.glob("server-*")}
    assert left == {"server-held", "server-fresh"}


@pytest.mark.parametrize("name", VARIANTS)
def test_all_pods_of_the_chart_meet_the_restricted_level(name):
    for one in objects(rendered(VARIANTS[name])):
        if one["kind"] not in ("Deployment", "Job"):
            continue
        pod = one["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is (one["kind"] == "Deployment")
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"image": {"repository": ""}}, "push Stoker's image"),
        ({"token": {"existingSecret": ""}}, "create secret generic stoker-token"),
        ({"replicas": 2}, "set database.kind to postgresql, or replicas to 1"),
        ({"database": {"existingSecret": "x"}}, "database.kind is sqlite"),
        ({"database": {"kind": "postgresql"}}, "create secret generic stoker-database"),
        ({**POSTGRESQL, "persistence": {"accessMode": "ReadWriteOnce"}}, "need ReadWriteMany"),
        ({"ingress": {"enabled": True}}, "ingress.host is empty"),
        ({"runs": {"createNamespace": True}}, "another one than the server's"),
        ({"runs": {"createNamespace": True, "namespace": "training"}}, "another one than the server's"),
        ({"config": {"server": {"port": 80}}}, "config.server.port is the chart's"),
        ({"cluster": {"settings": {"pools": {}}}}, "cluster.settings.pools is the chart's"),
        ({"cluster": {"name": "local"}}, "/cluster/name"),
        ({"cluster": {"name": "Main"}}, "/cluster/name"),
        ({"database": {"kind": "mysql"}}, "/database/kind"),
        ({"token": {"value": "secret"}}, "value"),
        ({"replica": 2}, "replica"),
        ({"config": {"sever": {}}}, "sever"),
        ({"replicas": "two"}, "/replicas"),
    ],
)
def test_values_that_cannot_work_are_refused(values, said):
    given = yaml.safe_dump(merged(LEAST, values))
    done = helm("template", "stoker", CHART, "-n", "training", "-f", "-", input=given)
    assert done.returncode != 0
    assert said in done.stderr
