"""The commits of the SDK: `sdk/commits.jsonl` has one line per checkpoint that the SDK has completed."""

from __future__ import annotations

import math
import os
import stat
from typing import Any, Dict, List, Optional

from stoker.linux.descriptors import Closing
from stoker.task import checkpoint_names, formats, layout

_LIMIT = 1 << 20


class Commits:
    """Reads the lines of one generation as they are written. Training code can write this file, so every value is checked."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, layout.COMMITS)
        self._generation = -1
        self.offset = 0

    def begin(self, generation: int, offset: Optional[int]) -> None:
        """Continue at `offset`; None: at the end, because the lines so far belong to earlier generations."""
        self._generation = generation
        if offset is None:
            try:
                offset = os.stat(self._path, follow_symlinks=False).st_size
            except FileNotFoundError:
                offset = 0
        self.offset = offset

    def read(self) -> List[Dict[str, Any]]:
        """New commits: {"name", "step", "metrics"}, checked."""
        try:
            if os.stat(self._path, follow_symlinks=False).st_size <= self.offset:
                return []
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return []
        with Closing(fd):
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return []
            data = os.pread(fd, _LIMIT, self.offset)
        lines, used = formats.split_lines(data)
        # The SDK writes no line longer than one read: it is skipped.
        self.offset += used or (len(data) if len(data) == _LIMIT else 0)
        found = (self._checked(raw) for raw in formats.parse_lines(lines))
        return [commit for commit in found if commit is not None]

    def _checked(self, raw: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        name, step, metrics = raw.get("name"), raw.get("step"), raw.get("metrics")
        if (
            not isinstance(name, str)
            or not name
            or "/" in name
            or "\0" in name
            or checkpoint_names.is_temporary(name)
        ):
            return None
        if raw.get("generation", self._generation) != self._generation:
            return None
        if not isinstance(step, int) or isinstance(step, bool):
            step = None
        values = metrics.items() if isinstance(metrics, dict) else ()
        numbers = {k: float(v) for k, v in values if isinstance(v, (int, float)) and math.isfinite(v)}
        return {"name": name, "step": step, "metrics": numbers}
