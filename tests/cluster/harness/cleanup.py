"""Ends a cluster completely, in any state: recorded or not, half started, or left by a crash."""

from __future__ import annotations

import contextlib
import shutil

from harness import cgroups, mounts, network
from harness.layout import Layout
from harness.processes import Ledger, Process, kill, marked

__all__ = ["clean", "remains"]


def clean(layout: Layout) -> None:
    """Remove everything of the cluster. Processes are killed at once, since their state is discarded."""
    cgroups.thaw_all(layout.cgroup)
    kill([*Ledger(layout.state, layout.logs).all().values(), *marked(layout.root)])
    # A process may have started another one just before it was killed.
    kill(marked(layout.root))
    kill(_pods(layout))
    mounts.unmount(layout.root)
    cgroups.remove(layout.cgroup)
    network.remove(layout)
    while layout.root.exists():
        # A watchdog may be cleaning up as well.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(layout.root)


def remains(layout: Layout) -> list[str]:
    """What is left of the cluster on this machine, one line each; empty after `clean`."""
    return [
        *(f"process {each.pid}" for each in [*marked(layout.root), *_pods(layout)]),
        *(f"mount {place}" for place in mounts.below(layout.root)),
        *(f"cgroup {path}" for path in cgroups.groups(layout.cgroup)),
        *network.remains(layout),
        *(f"file {path}" for path in [layout.root] if path.exists()),
    ]


def _pods(layout: Layout) -> list[Process]:
    return [process for pid in cgroups.members(layout.cgroup) if (process := Process.of(pid))]
