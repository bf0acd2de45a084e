"""`horovod-rank COMMAND...`: one rank under mpirun finds its place in HOROVOD_* too, as `horovodrun` would say it.

A Horovod built with MPI asks MPI and needs none of this; scripts and libraries that look at the variables do.
"""

from __future__ import annotations

import os
import sys
from typing import Dict, List, Mapping

from stoker.launcher.helpers import become

NAMES = {
    "HOROVOD_RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "HOROVOD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "HOROVOD_LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "HOROVOD_LOCAL_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}


def main(argv: List[str]) -> int:
    if not argv:
        print("usage: horovod-rank COMMAND...", file=sys.stderr)
        return 64
    return become(argv, {**os.environ, **variables(os.environ)})


def variables(environ: Mapping[str, str]) -> Dict[str, str]:
    """What MPI says, in Horovod's words. Hosts have equally many ranks: the nodes follow from that."""
    found = {}
    for name, sources in NAMES.items():
        value = next((environ[source] for source in sources if source in environ), None)
        if value is not None:
            found[name] = value
    if len(found) < len(NAMES):
        return {}
    rank, size, local = (int(found[name]) for name in ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"))
    found["HOROVOD_CROSS_RANK"], found["HOROVOD_CROSS_SIZE"] = str(rank // local), str(size // local)
    found["HOROVOD_CONTROLLER"] = environ.get("HOROVOD_CONTROLLER", "mpi")
    found["HOROVOD_CPU_OPERATIONS"] = environ.get("HOROVOD_CPU_OPERATIONS", "mpi")
    return found
