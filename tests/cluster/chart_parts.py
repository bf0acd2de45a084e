"""Shared by the tests of the chart: Helm, an installed release, and the command line pointed at it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from harness import Cluster, HarnessError, binary
from harness.api import until

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/chart"
WAIT = 300.0
"""Generous: only a broken cluster reaches it."""

Json = dict[str, Any]


def helm(
    *argv: str | Path, kubeconfig: Path | None = None, input: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run Helm with its own home; returns its output and exit code."""
    with tempfile.TemporaryDirectory() as home:
        env = {"PATH": os.environ["PATH"], "HOME": home, "KUBECONFIG": str(kubeconfig or "/nonexistent")}
        argv = (str(binary("helm")), *map(str, argv))
        return subprocess.run(argv, env=env, input=input, capture_output=True, text=True, timeout=900)


def rendered(values: Mapping[str, Any], *more: str) -> str:
    """The YAML that the chart renders from these values."""
    done = helm(
        "template", "stoker", CHART, "-n", "training", "-f", "-", *more, input=yaml.safe_dump(dict(values))
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text: str) -> list[Json]:
    return [found for found in yaml.safe_load_all(text) if found]


class Release:
    """An installed release of the chart. Clients outside the cluster reach the server through its Service."""

    def __init__(self, cluster: Cluster, namespace: str, home: Path, **values: Any) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, "stoker"
        self.token = secrets.token_hex(32)
        self._home = home
        self._address = self._free_address()
        registry, _, tag = cluster.images["stoker"].rpartition(":")
        base: Json = {
            "image": {"repository": registry, "tag": tag},
            "token": {"existingSecret": "stoker-token"},
            "service": {"clusterIP": self._address},
            "allowedHosts": [self._address],
            "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "1Gi"}},
            "cluster": {"defaultImage": cluster.images["nonroot"], "settings": {"default_cpu": 0.05}},
        }
        self.values = merged(base, values)

    def secret(self, name: str, **data: str) -> None:
        literals = [f"--from-literal={key}={value}" for key, value in data.items()]
        self.kubectl("create", "secret", "generic", name, *literals)

    def helm(self, *argv: str | Path, **values: Any) -> subprocess.CompletedProcess[str]:
        given = yaml.safe_dump(merged(self.values, values))
        where = ("-n", self.namespace, "--timeout", "10m")
        takes_values = argv[0] in ("install", "upgrade")
        more = ("-f", "-") if takes_values else ()
        return helm(*argv, *where, *more, kubeconfig=self.cluster.kubeconfig, input=given)

    def install(self, wait: str = "--wait", **values: Any) -> None:
        self._must(self.helm("install", self.name, CHART, wait, **values))
        if wait == "--wait":
            self.answers()

    def upgrade(self, **values: Any) -> None:
        self._must(self.helm("upgrade", self.name, CHART, **values))

    def rollback(self, revision: int) -> None:
        self._must(self.helm("rollback", self.name, str(revision)))

    def uninstall(self) -> None:
        self._must(self.helm("uninstall", self.name, "--wait"))

    def kubectl(self, *argv: str, input: str | None = None) -> str:
        return self.cluster.kubectl("-n", self.namespace, *argv, input=input)

    def pods(self, component: str = "server") -> list[Json]:
        chosen = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        found: list[Json] = json.loads(self.kubectl("get", "pods", "-l", chosen, "-o", "json"))["items"]
        return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]

    def ready(self) -> list[str]:
        return [
            pod["metadata"]["name"]
            for pod in self.pods()
            if any(
                one["type"] == "Ready" and one["status"] == "True"
                for one in pod["status"].get("conditions", [])
            )
        ]

    def stoker(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        self._home.mkdir(exist_ok=True)
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self._home),
            "STOKER_HOME": str(self._home / "none"),
            "STOKER_URL": f"http://{self._address}",
            "STOKER_TOKEN": self.token,
        }
        program = [sys.executable, "-P", "-m", "stoker.cli.main", *argv]
        done = subprocess.run(program, env=env, cwd=self._home, capture_output=True, text=True, timeout=600)
        if check and done.returncode:
            raise AssertionError(f"stoker {' '.join(argv)}: {done.returncode}\n{done.stderr}\n{self.said()}")
        return done

    def json(self, *argv: str) -> Any:
        return json.loads(self.stoker(argv[0], "--json", *argv[1:]).stdout)

    def answers(self) -> None:
        """Wait until the server can be reached: its Service follows a moment after its pod is ready."""
        self.until(lambda: self.stoker("cluster", "ls", check=False).returncode == 0, "the server to answer")

    def clusters(self) -> Json:
        """Clusters by name."""
        found: list[Json] = json.loads(self.stoker("cluster", "ls", "--json").stdout)
        return {one["name"]: one for one in found}

    def checks(self) -> Json:
        """Results of `cluster check` by item."""
        found: list[Json] = json.loads(self.stoker("cluster", "check", "main", "--json", check=False).stdout)
        return {one["name"]: one for one in found}

    def submit(self, script: str, *options: str) -> str:
        """Submit a Python script; returns the run id."""
        (self._home / "train.py").parent.mkdir(exist_ok=True)
        (self._home / "train.py").write_text(script)
        found: str = self.json("run", "-d", *options, "--", "python3", "train.py")["id"]
        return found

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            # A server that is being replaced does not answer for a moment.
            with suppress(AssertionError, HarnessError):
                return condition()
            return False

        until(holds, what, WAIT, self.said)

    def run_pod(self, run: str) -> Json:
        found: list[Json] = json.loads(
            self.kubectl("get", "pods", "-l", f"stoker.dev/run={run}", "-o", "json")
        )["items"]
        (pod,) = found
        return pod

    def said(self) -> str:
        """Pods, events and logs for the message of a failed test."""
        parts = [self.kubectl("get", "pods", "-o", "wide")]
        for pod in self.pods():
            with suppress(HarnessError):
                parts.append(self.kubectl("logs", pod["metadata"]["name"], "--all-containers", "--tail=60"))
        return "\n".join(parts)

    def _must(self, done: subprocess.CompletedProcess[str]) -> None:
        if done.returncode:
            job = "\n".join(json.dumps(pod["status"].get("containerStatuses")) for pod in self.pods("setup"))
            raise AssertionError(f"{done.stderr}\n{done.stdout}\n{job}\n{self.said()}")

    def _free_address(self) -> str:
        """A free address for the Service. The server answers only to host names in its configuration."""
        self.kubectl("create", "service", "clusterip", "any", "--tcp=80")
        found: Json = json.loads(self.kubectl("get", "service", "any", "-o", "json"))
        self.kubectl("delete", "service", "any")
        return str(found["spec"]["clusterIP"])


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> Json:
    """Merge values as Helm does: maps by key, everything else as a whole."""
    result = dict(base)
    for key, value in more.items():
        there = result.get(key)
        result[key] = (
            merged(there, value) if isinstance(there, Mapping) and isinstance(value, Mapping) else value
        )
    return result


@contextmanager
def forwarded(address: str, target: Path) -> Iterator[int]:
    """A TCP port of this machine that forwards to a Unix socket, for pods to reach."""

    class Through(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.socket(socket.AF_UNIX) as far, suppress(OSError):
                far.connect(str(target))
                back = threading.Thread(target=_copy, args=(far, self.request))
                back.start()
                _copy(self.request, far)
                back.join()

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True  # an open connection must not delay the end

    with Server((address, 0), Through) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            serving.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
