"""Joins a process to its world, for frameworks that do not do so by themselves."""

from __future__ import annotations

import os
from typing import Any, Dict


def jax_initialize(**options: Any) -> None:
    """Call `jax.distributed.initialize` with the coordinator, the number of processes and the id of this process.

    JAX finds these by itself only on some clusters. `options` are passed on and take precedence. With one process, and
    outside Stoker, nothing is done, so the script runs there unchanged.

    >>> jax_initialize()
    """
    count = int(os.environ.get("JAX_NUM_PROCESSES", "1"))
    if count == 1 and not options:
        return
    import jax  # not every environment has it

    found: Dict[str, Any] = {
        "coordinator_address": os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": count,
        "process_id": int(os.environ.get("JAX_PROCESS_ID", "0")),
    }
    own = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    if own:
        found["local_device_ids"] = [int(number) for number in own.split(",")]
    jax.distributed.initialize(**{**found, **options})
