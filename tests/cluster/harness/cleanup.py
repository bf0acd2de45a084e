"""Ending a cluster fully, whatever state it is in: recorded or not, half started, or left by a crash."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

from harness import cgroups, mounts, network
from harness.layout import Layout
from harness.processes import Ledger, Process, end, marked

__all__ = ["clean"]

_LINKS = Path("/var/log/containers")
"""Where every kubelet links its containers' logs, whatever its own directories are."""


def clean(layout: Layout) -> None:
    """After this nothing of the cluster is left: processes, pods, mounts, groups, links, rules, files."""
    ledger = Ledger(layout.state, layout.logs)
    cgroups.thaw_all(layout.cgroup)
    end([*ledger.all().values(), *marked(layout.root)])
    # A shim may have been started by what was ending.
    for process in marked(layout.root):
        process.send(signal.SIGKILL)
        process.wait(30)
    _end_pods(layout)
    sockets = _shim_sockets(layout.root)
    mounts.unmount(layout.root)
    cgroups.remove(layout.cgroup)
    network.remove(layout)
    for path in sockets:
        path.unlink(missing_ok=True)
    _unlink_logs(layout.root)
    shutil.rmtree(layout.root, ignore_errors=False) if layout.root.exists() else None


def _end_pods(layout: Layout) -> None:
    inside = [process for pid in cgroups.members(layout.cgroup) if (process := Process.of(pid))]
    for process in inside:
        process.send(signal.SIGKILL)
    for process in inside:
        process.wait(30)


def _shim_sockets(root: Path) -> list[Path]:
    """Shims listen outside of the runtime's own directories; each pod's bundle says where."""
    found = []
    for bundle in root.glob("node-*/state/io.containerd.runtime.v2.task/*/*/bootstrap.json"):
        try:
            address = json.loads(bundle.read_text())["address"]
        except (OSError, ValueError, KeyError):
            continue
        found.append(Path(str(address).removeprefix("unix://")))
    return found


def _unlink_logs(root: Path) -> None:
    if not _LINKS.is_dir():
        return
    for link in _LINKS.iterdir():
        if link.is_symlink() and str(link.readlink()).startswith(f"{root}/"):
            link.unlink(missing_ok=True)
