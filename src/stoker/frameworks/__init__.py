"""The frameworks: given the world, each task's environment and command.

`find` loads only the one that is asked for; they import nothing but each other and the job's own words.

base        Framework, World, TaskCommand
roles       the groups of tasks that a job becomes; pure
world       what every framework says of a world
commands    reads a command without running it
guessing    which framework a script uses, from its imports
plain       no framework
torch       torch, Lightning, accelerate
tensorflow  TF_CONFIG
jax         jax.distributed
mpi         mpirun, without ssh
horovod     Horovod under MPI
dask        Dask: scheduler, workers, client
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from stoker.frameworks.base import Framework

__all__ = ["NAMES", "find"]

PLAIN = "none"
NAMES = ("torch", "tensorflow", "jax", "mpi", "horovod", "dask", PLAIN)


def find(name: str | None) -> Framework:
    """The framework of a job's `framework`. None: ranks and peers, and nothing else."""
    name = PLAIN if name is None else name
    if name not in NAMES:
        raise LookupError(f"no such framework: {name!r}")
    module = import_module(f"stoker.frameworks.{'plain' if name == PLAIN else name}")
    return cast(Framework, module.framework)
