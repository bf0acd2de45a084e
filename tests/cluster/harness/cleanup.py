"""Ending a cluster fully, whatever state it is in: recorded or not, half started, or left by a crash."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from harness import cgroups, mounts, network, services
from harness.layout import Layout
from harness.processes import Ledger, Process, kill, marked

__all__ = ["clean", "remains"]

_LOG_LINKS = Path("/var/log/containers")
"""Where every kubelet links its containers' logs, whatever its own directories are."""
_CNI_RESULTS = Path("/var/lib/cni/results")
"""Where every runtime notes which pod it connected to which network."""


def clean(layout: Layout) -> None:
    """After this nothing of the cluster is left. Nothing is asked to end: what it would save is thrown away."""
    cgroups.thaw_all(layout.cgroup)
    kill([*Ledger(layout.state, layout.logs).all().values(), *marked(layout.root)])
    # What was ending may have started something in its last instant.
    kill(marked(layout.root))
    kill(_pods(layout))
    outside = _outside(layout)
    mounts.unmount(layout.root)
    cgroups.remove(layout.cgroup)
    services.remove(layout)
    network.remove(layout)
    for path in outside:
        path.unlink(missing_ok=True)
    if layout.root.exists():
        shutil.rmtree(layout.root)


def remains(layout: Layout) -> list[str]:
    """What there is of the cluster on this machine, one line each; nothing after `clean`."""
    return [
        *(f"process {each.pid}" for each in [*marked(layout.root), *_pods(layout)]),
        *(f"mount {place}" for place in mounts.below(layout.root)),
        *(f"cgroup {path}" for path in cgroups.groups(layout.cgroup)),
        *network.remains(layout),
        *services.remains(layout),
        *(f"file {path}" for path in [*_outside(layout), layout.root] if path.exists() or path.is_symlink()),
    ]


def _pods(layout: Layout) -> list[Process]:
    return [process for pid in cgroups.members(layout.cgroup) if (process := Process.of(pid))]


def _outside(layout: Layout) -> list[Path]:
    """Files that belong to the cluster and are not in its directory."""
    links = _LOG_LINKS.iterdir() if _LOG_LINKS.is_dir() else ()
    return [
        *_shim_sockets(layout.root),
        *(link for link in links if link.is_symlink() and str(link.readlink()).startswith(f"{layout.root}/")),
        *_CNI_RESULTS.glob(f"{layout.link}-*"),
    ]


def _shim_sockets(root: Path) -> list[Path]:
    """Each pod's bundle says where its shim listens."""
    found = []
    for bundle in root.glob("node-*/state/io.containerd.runtime.v2.task/*/*/bootstrap.json"):
        try:
            address = json.loads(bundle.read_text())["address"]
        except (OSError, ValueError, KeyError):
            continue
        found.append(Path(str(address).removeprefix("unix://")))
    return found
