"""Every rank adds its number; all get the sum."""

import os

from mpi4py import MPI

comm = MPI.COMM_WORLD
total = comm.allreduce(comm.rank + 1)
print(
    f"rank {comm.rank} of {comm.size} on {os.environ['STOKER_ROLE']}-{os.environ['STOKER_TASK_INDEX']}: {total}",
    flush=True,
)
