"""The main processes of a body: one, or several that stand and fall together."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional


class ProcessGroup:
    """Filled as they are started, in the order of their local ranks; told of every end."""

    def __init__(self) -> None:
        self.pids: List[int] = []
        self.expected = 0
        """How many there will be, while more are being started."""
        self.failed: Optional[int] = None
        """The local rank of the one that failed first."""
        self.rusage: Any = None
        """Of the one that needed most memory."""
        self._statuses: Dict[int, int] = {}

    def exited(self, pid: int, status: int, rusage: Any) -> bool:
        """Whether it was one of them."""
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
        """Once all have ended: the wait status of the one that failed first, else 0."""
        if not self.pids or len(self._statuses) < max(self.expected, len(self.pids)):
            return None
        return 0 if self.failed is None else self._statuses[self.pids[self.failed]]

    @property
    def broken(self) -> bool:
        """One has failed, others still run."""
        return self.failed is not None and self.status is None

    @property
    def violent(self) -> bool:
        """Some were ended by a signal."""
        return any(os.WIFSIGNALED(status) for status in self._statuses.values())
