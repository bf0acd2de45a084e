"""The main processes of a body: one, or several of which the first failure ends all."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional


class ProcessGroup:
    """The processes in the order of their local ranks. `exited` is called for every process that ends."""

    def __init__(self) -> None:
        self.pids: List[int] = []
        self.expected = 0
        """Number of processes, including those still to be started."""
        self.failed: Optional[int] = None
        """Local rank of the one that failed first."""
        self.rusage: Any = None
        """Resource usage of the one with the largest peak memory."""
        self._statuses: Dict[int, int] = {}

    def exited(self, pid: int, status: int, rusage: Any) -> bool:
        """Record the end of a process; whether it is one of these."""
        if pid not in self.pids or pid in self._statuses:
            return False
        self._statuses[pid] = status
        if self.rusage is None or rusage.ru_maxrss > self.rusage.ru_maxrss:
            self.rusage = rusage
        if status != 0 and self.failed is None:
            self.failed = self.pids.index(pid)
        return True

    @property
    def status(self) -> Optional[int]:
        """The wait status of the one that failed first, else 0; None until all have ended."""
        if not self.pids or len(self._statuses) < max(self.expected, len(self.pids)):
            return None
        return 0 if self.failed is None else self._statuses[self.pids[self.failed]]

    @property
    def broken(self) -> bool:
        """Whether one has failed while others still run."""
        return self.failed is not None and self.status is None

    @property
    def violent(self) -> bool:
        """Whether a signal ended one of them."""
        return any(os.WIFSIGNALED(status) for status in self._statuses.values())
