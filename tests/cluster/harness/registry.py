"""A registry on the machine's own address; the nodes' runtimes pull from it over plain HTTP."""

from __future__ import annotations

import socket

import yaml

from harness.api import answers, until
from harness.layout import Layout
from harness.processes import Ledger

__all__ = ["start"]


def start(layout: Layout, ledger: Ledger) -> str:
    """Start it; returns its host:port, which stays the same unless the port is taken."""
    port = _port(5737 + layout.slot)
    home = layout.root / "registry"
    home.mkdir(parents=True, exist_ok=True)
    config = {
        "version": 0.1,
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(home)}, "delete": {"enabled": True}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    path = layout.root / "registry.yaml"
    path.write_text(yaml.safe_dump(config))
    ledger.start("registry", ["docker-registry", "serve", path])
    until(
        lambda: answers(f"http://127.0.0.1:{port}/v2/"),
        "the registry",
        evidence=lambda: ledger.tail("registry"),
    )
    return f"127.0.0.1:{port}"


def _port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no free port")
