"""mpi4py: ranks that mpirun starts on the workers."""

import os

import loop
from mpi4py import MPI

comm = MPI.COMM_WORLD
loop.say(f"on {os.environ['STOKER_ROLE']}-{os.environ['STOKER_TASK_INDEX']} rank {comm.rank} of {comm.size}")
loop.train(comm.rank, comm.size, comm.allreduce)
