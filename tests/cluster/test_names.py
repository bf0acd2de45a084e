"""Names of Services and pods resolve after a test asks for them."""

from __future__ import annotations

import pytest
from harness.api import until
from harness.errors import HarnessError
from harness.pods import address, apply, pod, running

FOREVER = "while true; do sleep 1; done"


@pytest.mark.soak
def test_a_pod_is_found_by_its_name(cluster, namespace):
    cluster.names()
    image = cluster.images["root"]
    group = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "group"},
        "spec": {"clusterIP": "None", "selector": {"app": "server"}, "ports": [{"port": 8000}]},
    }
    server = pod("server", image, FOREVER, hostname="first", subdomain="group")
    apply(cluster, namespace, group, server, pod("client", image, FOREVER))
    running(cluster, namespace, "server", "client")
    script = "import socket; print(socket.gethostbyname('first.group'))"

    def resolved() -> str:
        try:
            return cluster.kubectl("-n", namespace, "exec", "client", "--", "python3", "-c", script).strip()
        except HarnessError:
            return ""

    until(
        lambda: resolved() == address(cluster, namespace, "server"), "the name to resolve", evidence=resolved
    )
