"""The routes, one file per noun. Thin: they check what was sent, call the services and show the answer.

runs      submit, list, show, stop, resume
logs      the log of a run, whole or as it is written
metrics   what a run reported
files     outputs, checkpoints, logs
code      uploads of code
nodes     the machines
clusters  the clusters
storage   removed runs, and what takes the room
admin     health, backups, the end of the server
"""

from __future__ import annotations

from typing import cast

from fastapi import Request

from stoker.server.services import Services
from stoker.store.rows import RunRow


def services_of(request: Request) -> Services:
    return cast(Services, request.app.state.services)


def run_of(request: Request, ref: str) -> RunRow:
    """The run a path names: an id, a name or the beginning of an id."""
    return services_of(request).store.resolve(ref)
