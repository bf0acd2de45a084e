"""The cluster's network controller: one process that turns NetworkPolicies and Services into rules."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from harness import policies, services
from harness.api import Api
from harness.errors import HarnessError, command
from harness.layout import Layout
from harness.watching import Objects

__all__ = ["connect"]


def connect(layout: Layout) -> None:
    """Keep the rules in step with the cluster until ended."""
    api = Api(layout)
    serve = (
        api,
        (services.SERVICES, services.ENDPOINTS),
        lambda *found: services.rules(layout.services_table, *found),
    )
    threading.Thread(target=_keep, args=serve, daemon=True).start()
    paths = (policies.POLICIES, policies.PODS, policies.NAMESPACES)
    _keep(api, paths, lambda *found: policies.rules(layout.policies_table, *found))


def _keep(api: Api, paths: tuple[str, ...], rules: Callable[..., str]) -> None:
    """Install the output of `rules` for the objects at `paths`, whenever it changes."""
    objects = Objects(api, paths)
    last = ""
    while True:
        seen: dict[str, list[Any]] = objects.wait()
        new = rules(*(seen[path] for path in paths))
        if new == last:
            continue
        try:
            command(["nft", "-f", "-"], input=new)
            last = new
        except (HarnessError, subprocess.TimeoutExpired) as error:
            print(f"{error}\n{new}", file=sys.stderr, flush=True)
