"""The variables that Horovod reads, beside those of MPI."""

import os

from mpi4py import MPI

comm = MPI.COMM_WORLD
names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "CONTROLLER")
said = " ".join(os.environ[f"HOROVOD_{name}"] for name in names)
where = f"{os.environ['STOKER_ROLE']}-{os.environ['STOKER_TASK_INDEX']}"
for rank in range(comm.size):
    comm.barrier()
    if rank == comm.rank:
        os.write(1, f"rank {comm.rank} of {comm.size} on {where}: {said}\n".encode())
