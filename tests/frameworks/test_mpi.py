"""Open MPI without ssh: mpirun's daemons are started by our remote shell."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("run", [None, "mpirun -np 2 --map-by node python mpi_sum.py"])
def test_ranks_on_two_workers_add_up(gang: Any, run: str | None) -> None:
    it = gang("mpi_sum.py", run=run, framework="mpi", workers=2)
    it.start()
    it.succeeded("launcher-0")
    said = it.text("launcher-0")
    assert "rank 0 of 2 on worker-0: 3" in said
    assert "rank 1 of 2 on worker-1: 3" in said
