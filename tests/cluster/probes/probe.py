"""Probes client libraries on a real cluster of its own and prints a table: `python probe.py PYTHON [LIBRARY ...]`.

PYTHON is an interpreter that has the libraries (lightkube, kr8s, kubernetes-asyncio, kubernetes), aiohttp, psutil and
pyyaml; this program itself runs with the project's. The cluster is a new one in STOKER_CLUSTER_SLOT (9 if unset).
SCENARIOS in the environment names some instead of all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import trustme
from harness import Cluster, Layout

HERE = Path(__file__).parent
LIBRARIES = ("lightkube", "kr8s", "kubernetes_asyncio", "kubernetes", "stoker")


def prepare(cluster: Cluster, where: Path) -> None:
    for name in ("a", "b"):
        cluster.kubectl("create", "serviceaccount", name)
        cluster.kubectl(
            "create",
            "clusterrolebinding",
            f"probe-{name}",
            "--clusterrole=cluster-admin",
            f"--serviceaccount=default:{name}",
        )
        (where / f"{name}.token").write_text(cluster.kubectl("create", "token", name).strip())
    pki = cluster.kubeconfig.parent / "pki"
    for name, user in (("a", "admin"), ("b", "kube-scheduler")):
        for end in ("crt", "key"):
            (where / f"{name}.{end}").write_bytes((pki / f"{user}.{end}").read_bytes())
    (where / "ca.crt").write_bytes((pki / "ca.crt").read_bytes())
    trustme.CA().cert_pem.write_to_path(where / "other-ca.crt")
    old = version(cluster)
    for number in range(20):
        cluster.kubectl("create", "configmap", f"before-{number}")
    cluster.compact()
    note(cluster, where, old)


def version(cluster: Cluster) -> str:
    return str(
        json.loads(cluster.kubectl("get", "--raw", "/api/v1/namespaces/default/configmaps"))["metadata"][
            "resourceVersion"
        ]
    )


def note(cluster: Cluster, where: Path, old: str) -> None:
    server = json.loads(cluster.kubectl("config", "view", "-o", "json"))["clusters"][0]["cluster"]["server"]
    (where / "facts.json").write_text(
        json.dumps({"server": server, "version": version(cluster), "old_version": old})
    )


def run(cluster: Cluster, where: Path, python: str, library: str, scenario: str) -> str:
    old = json.loads((where / "facts.json").read_text())["old_version"]
    note(cluster, where, old)
    argv = [python, "-W", "ignore", str(HERE / "scenarios.py"), library, scenario, str(where)]
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    environment["PYTHONPATH"] = str(HERE.parent.parent.parent / "src")
    if scenario == "in_cluster":
        argv, extra = inside(cluster, where, argv)
        environment.update(extra)
    process = subprocess.Popen(
        argv, cwd=where, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 150
    while process.poll() is None:
        serve(cluster, where)
        if time.monotonic() > until:
            process.kill()
            cluster.start_api()
            return "did not end within 150 s"
        time.sleep(0.05)
    out, err = process.communicate()
    return (
        out.strip().splitlines()[-1]
        if out.strip()
        else f"broke: {err.strip().splitlines()[-1] if err.strip() else ''}"
    )


def serve(cluster: Cluster, where: Path) -> None:
    """Faults a scenario asks for."""
    if not (where / "fault").exists():
        return
    name = (where / "fault").read_text()
    if name == "freeze":
        cluster.stop_api(freeze=True)
    elif name == "thaw":
        cluster.start_api()
    elif name == "restart":
        cluster.stop_api()
        cluster.start_api()
    elif name == "create":
        cluster.kubectl("create", "configmap", f"probe-{time.time_ns()}")
    if name:
        (where / "fault").unlink()


def inside(cluster: Cluster, where: Path, argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """As in a pod: the account's files at their place, in a mount namespace of the process's own."""
    account = where / "account"
    account.mkdir(exist_ok=True)
    (account / "token").write_bytes((where / "a.token").read_bytes())
    (account / "ca.crt").write_bytes((where / "ca.crt").read_bytes())
    (account / "namespace").write_text("default")
    place = "/run/secrets/kubernetes.io/serviceaccount"
    mount = f'mount -t tmpfs tmpfs /run && mkdir -p {place} && mount --bind {account} {place} && exec "$@"'
    server = json.loads((where / "facts.json").read_text())["server"].removeprefix("https://")
    host, _, port = server.partition(":")
    environment = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    return ["unshare", "-m", "sh", "-c", mount, "sh", *argv], environment


def main() -> None:
    python, libraries = sys.argv[1], sys.argv[2:] or LIBRARIES
    only = os.environ.get("SCENARIOS", "").split()
    sys.argv[3:] = []
    from scenarios import SCENARIOS

    layout = Layout(slot=int(os.environ.get("STOKER_CLUSTER_SLOT") or 9))
    if Cluster.attach(layout) is not None:
        sys.exit(f"a cluster runs in slot {layout.slot}, and this would break it")
    cluster = Cluster.start(layout, nodes=1, owner=os.getpid())
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            where = Path(name)
            prepare(cluster, where)
            for scenario in only or SCENARIOS:
                for library in libraries:
                    print(
                        f"{scenario:28} {library:20} {run(cluster, where, python, library, scenario)}",
                        flush=True,
                    )
    finally:
        cluster.stop()


if __name__ == "__main__":
    main()
