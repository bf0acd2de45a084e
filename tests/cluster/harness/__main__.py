"""`python -m harness up|down|status|build`: a cluster that stays up, for manual use and many test runs."""

from __future__ import annotations

import argparse
import sys

from harness.binaries import CORE, binary
from harness.cleanup import clean
from harness.cluster import Cluster
from harness.connecting import connect
from harness.errors import HarnessError
from harness.layout import Layout, locked
from harness.processes import Ledger, Process


def main() -> int:
    parser = argparse.ArgumentParser(prog="harness")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("up")
    verbs.add_parser("down")
    verbs.add_parser("status")
    verbs.add_parser("build").add_argument("names", nargs="*")
    for verb, names in (("watch", ("slot", "pid", "start")), ("connect", ("slot",))):
        internal = verbs.add_parser(verb)
        for name in names:
            internal.add_argument(name, type=int)
    asked = parser.parse_args()
    try:
        return _VERBS[asked.verb](asked)
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _up(_: argparse.Namespace) -> int:
    _describe(Cluster.obtain())
    return 0


def _down(_: argparse.Namespace) -> int:
    with locked(Layout().lock):
        clean(Layout())
    return 0


def _status(_: argparse.Namespace) -> int:
    cluster = Cluster.attach()
    if cluster is None:
        print("no cluster is running")
        return 1
    _describe(cluster)
    return 0


def _build(asked: argparse.Namespace) -> int:
    """Build in advance: a build takes minutes, and its progress is not visible during a test."""
    for name in [*CORE, *asked.names]:
        print(binary(name))
    return 0


def _describe(cluster: Cluster) -> None:
    print(f"export KUBECONFIG={cluster.kubeconfig}")
    print(f"# registry: {cluster.registry}")
    print(f"# logs: {cluster.logs}")


def _watch(asked: argparse.Namespace) -> int:
    """Wait for the owner process, then end the cluster, even after the owner was killed."""
    Process(asked.pid, asked.start).wait(None)
    layout = Layout(asked.slot)
    with locked(layout.lock):
        if Ledger(layout.state, layout.logs).read().get("owner") == [asked.pid, asked.start]:
            clean(layout)
    return 0


def _connect(asked: argparse.Namespace) -> int:
    connect(Layout(asked.slot))
    return 0


_VERBS = {
    "up": _up,
    "down": _down,
    "status": _status,
    "build": _build,
    "watch": _watch,
    "connect": _connect,
}

if __name__ == "__main__":
    sys.exit(main())
