"""Row 12: a real Kubernetes, ours against a bare pod of the same shape."""

from __future__ import annotations

import base64
import http.client
import json
import shlex
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from bench import ours
from bench.figures import figure, ratio
from bench.peers import Peers
from bench.plan import Scale
from bench.progress import say
from bench.results import Bar, Line, Row

TITLE = "Kubernetes: from the command to the first line it prints"
RUN, RAW = "stoker run --cluster", "kubectl create of a bare pod (init, sidecar, main)"
WHY_IMAGE, WHY_ROOM = "`why` names an image that cannot be pulled", "`why` names what no node has"
NAMESPACE = "stoker-bench"
CLUSTER = Path(__file__).parent.parent / "tests" / "cluster"


def measure(root: Path, peers: Peers, scale: Scale) -> Row:
    """`peers` is not used: the peer is Kubernetes itself, with the cluster of the tests."""
    rounds = 3 if scale.quick else 15
    with _cluster() as (cluster, image):
        api = _Api(cluster.kubeconfig)
        with ours.server(root / "ours") as server:
            _add(server, cluster, image)
            mine: list[float | None] = []
            bare: list[float | None] = []
            _ours(server, root)  # brings the image to both nodes and opens the first connections
            _raw(cluster, api, image, 1000), _raw(cluster, api, image, 1001)
            for number in range(rounds):
                mine.append(_ours(server, root))
                bare.append(_raw(cluster, api, image, number))
                say(f"  round {number + 1} of {rounds}: ours {mine[-1]:.2f} s, a bare pod {bare[-1]:.2f} s")
            image_said = [_told(server, api, _bad_image, "cannot be pulled") for _ in range(3)]
            room_said = [_told(server, api, _no_room, "node") for _ in range(3)]
    gaps = [
        one - other for one, other in zip(mine, bare, strict=True) if one is not None and other is not None
    ]
    both = figure([one for one in mine if one], "s"), figure([one for one in bare if one], "s")
    return Row(
        12,
        TITLE,
        [
            Line(
                f"{RUN}, beyond a bare pod",
                RAW,
                figure(gaps, "s"),
                bar=Bar("<=", 1.5, "s"),
                goal=Bar("<=", 0.3, "s"),
            ),
            Line(RUN, RAW, *both, ratio(mine, bare)),
            Line(WHY_IMAGE, "the API server shows it", figure(image_said, "s"), bar=Bar("<=", 10, "s")),
            Line(WHY_ROOM, "the API server shows it", figure(room_said, "s"), bar=Bar("<=", 10, "s")),
        ],
    )


@contextmanager
def _cluster() -> Iterator[tuple[Any, str]]:
    """The tests' cluster: the running one, or a new one for this row."""
    sys.path.insert(0, str(CLUSTER))
    try:
        from harness import Cluster
        from images import build_test_images
    finally:
        sys.path.remove(str(CLUSTER))
    running = Cluster.attach()
    cluster = running or Cluster.start()
    try:
        image = cluster.images.get("train") or build_test_images(cluster.registry)["train"]
        cluster.kubectl("create", "namespace", NAMESPACE)
        yield cluster, image
    finally:
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false", "--ignore-not-found")
        if running is None:
            cluster.stop()


def _add(server: ours.Ours, cluster: Any, image: str) -> None:
    words = f"cluster add lab --namespace {NAMESPACE} --image {image} --set default_cpu=0.1 --set start_deadline=2m"
    pool = "pools.empty={selector: {stoker-bench: none}, autoscale: {max_nodes: 1, cpu: 2, memory: 4Gi}}"
    argv = [ours.stoker(), *shlex.split(words), "--set", pool, "--kubeconfig", str(cluster.kubeconfig)]
    subprocess.run(argv, env=dict(server.env), check=True, capture_output=True, stdin=subprocess.DEVNULL)


def _ours(server: ours.Ours, root: Path) -> float:
    """Seconds from the command to the first line on its stdout."""
    work = root / "work"
    work.mkdir(exist_ok=True)
    argv = [
        ours.stoker(),
        "run",
        "--cluster",
        "lab",
        "--",
        "python3",
        "-c",
        "print('first line', flush=True)",
    ]
    begin = time.monotonic()
    with subprocess.Popen(
        argv,
        cwd=work,
        env=dict(server.env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        took = time.monotonic() - begin
        said = process.stderr.read()
    if b"first line" not in line:
        raise RuntimeError(f"stoker run --cluster printed {line!r}: {said.decode()[-500:]}")
    return took


def _raw(cluster: Any, api: _Api, image: str, number: int) -> float:
    """Seconds from `kubectl create` to the first line in the pod's log."""
    name = f"bare-{number}"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(_pod(name, image), file)
        file.flush()
        begin = time.monotonic()
        cluster.kubectl("-n", NAMESPACE, "create", "-f", file.name)
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/log?container=main"
    _until(lambda: b"first line" in api.get(path))
    took = time.monotonic() - begin
    cluster.kubectl("-n", NAMESPACE, "delete", "pod", name, "--wait=false", "--grace-period=1")
    return took


def _pod(name: str, image: str) -> dict[str, Any]:
    """The shape of Stoker's pod: a short init container, a sidecar, then the program."""
    sizes = {"requests": {"cpu": "50m", "memory": "96Mi"}}
    python = ["python3", "-I", "-S", "-c"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "automountServiceAccountToken": False,
            "restartPolicy": "OnFailure",
            "terminationGracePeriodSeconds": 1,
            "initContainers": [
                {"name": "init", "image": image, "command": [*python, "pass"], "resources": sizes},
                {
                    "name": "sidecar",
                    "image": image,
                    "restartPolicy": "Always",
                    "command": [*python, "import time; time.sleep(3600)"],
                    "resources": sizes,
                },
            ],
            "containers": [
                {
                    "name": "main",
                    "image": image,
                    "command": ["python3", "-c", "print('first line', flush=True)"],
                    "resources": sizes,
                }
            ],
        },
    }


def _bad_image(server: ours.Ours) -> dict[str, Any]:
    return {"run": ["true"], "cluster": "lab", "image": "127.0.0.1:1/no/such:image", "name": "why"}


def _no_room(server: ours.Ours) -> dict[str, Any]:
    """An empty pool that could grow: the pod is created, and only the cluster's scheduler can refuse it."""
    return {
        "run": ["true"],
        "cluster": "lab",
        "name": "why",
        "pool": "empty",
        "resources": {"memory": 64 << 20},
    }


def _told(server: ours.Ours, api: _Api, job: Callable[[ours.Ours], dict[str, Any]], word: str) -> float:
    """Seconds from the moment the API server shows that a pod cannot start until `why` names the cause."""
    key = f"why-{time.monotonic_ns()}"
    with server.client() as client:
        run = client.submit(key=key, job=job(server), code=None, secrets={}, record={})["id"]
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=stoker.dev%2Frun%3D{run}"
        shown: float | None = None
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if shown is None and _troubled(json.loads(api.get(path))):
                shown = time.monotonic()
            if word in str(client.why(run)["text"]):
                break
            time.sleep(0.02)
        else:
            raise RuntimeError(f"`why` did not say {word!r} of {run}: {client.why(run)['text']}")
        took = 0.0 if shown is None else time.monotonic() - shown
        client.stop(run, kill=True)
    return took


def _troubled(pods: dict[str, Any]) -> bool:
    for pod in pods.get("items") or []:
        status = pod["status"]
        waiting = [
            (container.get("state") or {}).get("waiting") or {}
            for container in [
                *(status.get("initContainerStatuses") or []),
                *(status.get("containerStatuses") or []),
            ]
        ]
        if any("Image" in str(found.get("reason")) for found in waiting):
            return True
        if any(found.get("reason") == "Unschedulable" for found in status.get("conditions") or []):
            return True
    return False


def _until(good: Callable[[], bool], limit: float = 120.0) -> None:
    deadline = time.monotonic() + limit
    while not good():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {limit:.0f} s for a bare pod")
        time.sleep(0.01)


class _Api:
    """The API server over one persistent connection, so that a request costs little."""

    def __init__(self, kubeconfig: Path) -> None:
        found = yaml.safe_load(kubeconfig.read_text())
        cluster, user = found["clusters"][0]["cluster"], found["users"][0]["user"]
        context = ssl.create_default_context(
            cadata=base64.b64decode(cluster["certificate-authority-data"]).decode()
        )
        with tempfile.NamedTemporaryFile() as cert, tempfile.NamedTemporaryFile() as key:
            for file, name in ((cert, "client-certificate-data"), (key, "client-key-data")):
                file.write(base64.b64decode(user[name]))
                file.flush()
            context.load_cert_chain(cert.name, key.name)
        self._host = str(cluster["server"]).removeprefix("https://")
        self._context = context
        self._connection: http.client.HTTPSConnection | None = None

    def get(self, path: str) -> bytes:
        if self._connection is None:
            self._connection = http.client.HTTPSConnection(self._host, context=self._context, timeout=30)
        self._connection.request("GET", path)
        return self._connection.getresponse().read()
