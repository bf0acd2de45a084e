"""Horovod under MPI: every rank also gets HOROVOD_*, as `horovodrun` would set it."""

from __future__ import annotations

from stoker.frameworks.mpi import Mpi


class Horovod(Mpi):
    name = "horovod"
    helper = "horovodrun"


framework = Horovod()
