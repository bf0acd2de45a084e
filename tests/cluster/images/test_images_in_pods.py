"""Every test image, and Stoker's own, in a pod of a real cluster."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Layout, binary
from harness.api import until

from images import NAMES, build_test_images
from images.recipes import build
from stoker.images import Registry
from stoker.images.build import write_archive

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
FIT = """
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
x, y = load_digits(return_X_y=True)
model = LogisticRegression(max_iter=300).fit(x[:1200] / 16, y[:1200])
print("accuracy", model.score(x[1200:] / 16, y[1200:]))
"""


@pytest.fixture(scope="module")
def references(cluster: Any) -> dict[str, str]:
    return build_test_images(cluster.registry)


class Pods:
    """Runs the pods of one namespace to their end."""

    def __init__(self, cluster: Any, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace

    def start(self, name: str, image: str, **container: Any) -> None:
        mounts = container.pop("volumes", [])
        spec = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "main",
                    "image": image,
                    "volumeMounts": [{"name": f"v{i}", "mountPath": path} for i, path in enumerate(mounts)],
                    **container,
                }
            ],
            "volumes": [{"name": f"v{i}", "emptyDir": {}} for i in range(len(mounts))],
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        self._cluster.kubectl("-n", self._namespace, "apply", "-f", "-", input=json.dumps(pod))

    def state(self, name: str) -> tuple[str, str]:
        """Phase, and the reason why its container waits."""
        found = json.loads(self._cluster.kubectl("-n", self._namespace, "get", "pod", name, "-o", "json"))[
            "status"
        ]
        for status in found.get("containerStatuses") or []:
            return found["phase"], status["state"].get("waiting", {}).get("reason", "")
        return found["phase"], ""

    def output(self, name: str) -> str:
        """The pod's output, once it has succeeded."""
        until(
            lambda: self.state(name)[0] in ("Succeeded", "Failed"),
            f"the end of {name}",
            evidence=lambda: self.describe(name),
        )
        printed = self._cluster.kubectl("-n", self._namespace, "logs", name)
        assert self.state(name)[0] == "Succeeded", printed
        return str(printed)

    def describe(self, name: str) -> str:
        return str(self._cluster.kubectl("-n", self._namespace, "describe", "pod", name))

    def exec(self, name: str, *argv: str) -> str:
        return str(self._cluster.kubectl("-n", self._namespace, "exec", name, "--", *argv))


@pytest.fixture
def pods(cluster: Any, namespace: str) -> Pods:
    return Pods(cluster, namespace)


def test_root(pods: Pods, references: dict[str, str]) -> None:
    code = "import ssl, sqlite3, ctypes, os; print(os.getuid(), len(ssl.create_default_context().get_ca_certs()) > 50)"
    pods.start("root", references["root"], command=["/usr/bin/python3", "-c", code])
    assert pods.output("root") == "0 True\n"


def test_a_user_by_name_needs_its_number(pods: Pods, references: dict[str, str]) -> None:
    with Registry() as registry:
        config = registry.config(references["nonroot"])
        account = registry.account(config)
    assert (config.user, config.workdir, account.uid, account.gid) == ("app", "/home/app", 1000, 1000)
    command = ["sh", "-c", "id -u; id -un; id -g; pwd; touch mine"]
    pods.start("named", config.reference, command=command, securityContext=RESTRICTED)
    numbers = {"runAsUser": account.uid, "runAsGroup": account.gid}
    pods.start("numbered", config.reference, command=command, securityContext=RESTRICTED | numbers)
    assert pods.output("numbered").split() == ["1000", "app", "1000", "/home/app"]
    until(lambda: pods.state("named")[1] == "CreateContainerConfigError", "the refusal of a user by name")


def test_python_only_where_conda_has_it(pods: Pods, references: dict[str, str]) -> None:
    code = "import sys, ssl; print(sys.executable, sys.prefix)"
    script = f"command -v python3; test -e /usr/bin/python3 || echo none; exec python3 -I -c '{code}'"
    pods.start("conda", references["conda"], command=["/bin/sh", "-c", script])
    assert pods.output("conda").split() == [
        "/opt/conda/bin/python3",
        "none",
        "/opt/conda/bin/python3",
        "/opt/conda",
    ]


def test_the_entrypoint_of_an_image(pods: Pods, references: dict[str, str]) -> None:
    pods.start("plain", references["entrypoint"])
    pods.start("given", references["entrypoint"], args=["2", "more"])
    lines = pods.output("plain").splitlines()
    assert lines[0] == "entry.sh in /app as 0, 0 arguments: "
    assert lines[-2:] == ["step 20 slope 2.9963", "done: entrypoint"]
    assert pods.output("given").splitlines()[0] == "entry.sh in /app as 0, 2 arguments: 2 more"


def test_no_python(pods: Pods, references: dict[str, str]) -> None:
    pods.start("bare", references["nopython"], command=["sh", "-c", "command -v python3 python || echo none"])
    assert pods.output("bare") == "none\n"


def test_a_read_only_root(pods: Pods, references: dict[str, str]) -> None:
    script = "touch /job/x 2>/dev/null || echo closed; touch /tmp/x && echo open; python3 -c 'print(1)'; pwd; id -u"
    context = RESTRICTED | {"readOnlyRootFilesystem": True}
    pods.start(
        "ro", references["readonly"], command=["sh", "-c", script], securityContext=context, volumes=["/tmp"]
    )
    assert pods.output("ro").split() == ["closed", "open", "1", "/job", "1001"]


def test_a_real_training(pods: Pods, references: dict[str, str]) -> None:
    pods.start("train", references["train"], command=["python3", "-c", FIT])
    word, value = pods.output("train").split()
    assert word == "accuracy" and float(value) > 0.9


def test_the_server_in_stokers_image(pods: Pods, references: dict[str, str]) -> None:
    """As the chart runs it: not root, read-only root, its home on a volume."""
    context = RESTRICTED | {"readOnlyRootFilesystem": True}
    volumes = ["/var/lib/stoker", "/tmp"]
    image = references["stoker"]
    pods.start("version", image, args=["--version"], securityContext=context, volumes=volumes)
    pods.start(
        "server",
        image,
        command=["python3", "-m", "stoker.server"],
        securityContext=context,
        volumes=volumes,
    )
    assert "0.1" in pods.output("version")
    until(
        lambda: pods.state("server")[0] == "Running", "the server", evidence=lambda: pods.describe("server")
    )
    status = "until test -f server.json; do sleep 0.1; done; stoker server status --json; stoker ps --json"
    answer = pods.exec("server", "sh", "-c", status)
    found, end = json.JSONDecoder().raw_decode(answer)
    assert found["pid"] == 1 and json.loads(answer[end:]) == []
    assert (
        pods.exec("server", "python3", "-I", "-S", "-m", "zipfile", "-l", "/opt/stoker/bundle.zip").count(
            "launcher"
        )
        > 10
    )


@pytest.fixture
def containerd(cluster: Any, tmp_path: Path) -> Iterator[list[str]]:
    """`ctr` on a node, in its own namespace."""
    if not hasattr(cluster, "_layout"):
        pytest.skip("needs a node of this machine")
    layout: Layout = cluster._layout
    ctr = [
        str(binary("ctr")),
        "--address",
        str(layout.root / "node-1/containerd.sock"),
        "--namespace",
        "imported",
    ]
    yield ctr
    listed = subprocess.run(
        [*ctr, "images", "list", "-q"], capture_output=True, text=True, check=True
    ).stdout.split()
    subprocess.run([*ctr, "images", "remove", "--sync", *listed], capture_output=True, check=True)
    subprocess.run([*ctr[:3], "namespaces", "remove", "imported"], capture_output=True, check=False)


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("nopython", "nonroot", "stoker")])
def test_ctr_imports_archives(containerd: list[str], tmp_path: Path, name: str) -> None:
    image = build(name)
    write_archive(image, tmp_path / "image.tar", f"registry.example.com/{name}:1")
    done = subprocess.run(
        [*containerd, "images", "import", tmp_path / "image.tar"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    shown = subprocess.run([*containerd, "images", "list"], capture_output=True, text=True, check=True).stdout
    assert f"registry.example.com/{name}:1 " in shown and image.digest in shown
