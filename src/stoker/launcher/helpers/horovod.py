"""`horovod-rank COMMAND...`: sets HOROVOD_* for one rank under mpirun, as `horovodrun` does.

A Horovod built with MPI does not need these variables; some scripts and libraries read them.
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
    """Horovod's variables from those of MPI. All hosts have the same number of ranks, so the cross rank follows from that."""
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
