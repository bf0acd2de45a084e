"""Joining the world that this process was started in, where a framework does not do so by itself."""

from __future__ import annotations

import os
from typing import Any, Dict


def jax_initialize(**options: Any) -> None:
    """`jax.distributed.initialize`, with the coordinator, the number of processes and this one's number filled in.

    JAX finds these by itself only on some clusters. `options` are passed on and go over what is found. With one process,
    and outside Stoker, it does nothing, so that the script runs there unchanged.

    >>> jax_initialize()
    """
    count = int(os.environ.get("JAX_NUM_PROCESSES", "1"))
    if count == 1 and not options:
        return
    import jax  # only when training code asks for it by name

    found: Dict[str, Any] = {
        "coordinator_address": os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": count,
        "process_id": int(os.environ.get("JAX_PROCESS_ID", "0")),
    }
    own = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    if own:
        found["local_device_ids"] = [int(number) for number in own.split(",")]
    jax.distributed.initialize(**{**found, **options})
