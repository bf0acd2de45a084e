"""The records of a launcher, journal and status: written in order, and retried when the disk was full."""

from __future__ import annotations

import os
from typing import Any, List, Mapping, Optional, Tuple

from stoker.launcher import task_files
from stoker.launcher.journal import Journal
from stoker.launcher.telemetry.output_log import OutputLog
from stoker.linux.process import boot_id
from stoker.task import layout
from stoker.task.formats import Ending, Status


class Records:
    """One per launcher, used from its one thread. Raises DirectoryGone when the task directory was removed."""

    def __init__(self, directory: str, log: OutputLog) -> None:
        self.directory = directory
        self.journal = Journal(directory)
        self.log = log
        self.status = Status(phase="ready", launcher_pid=os.getpid(), boot_id=boot_id())
        self.status.version = task_files.version()
        self.status_due: Optional[float] = None
        """The latest time at which the status must be written."""
        self._identity = task_files.identity(directory)
        self._unwritten: List[Tuple[Mapping[str, Any], bool]] = []
        self._status_failed = False

    @property
    def unwritten(self) -> bool:
        """Whether entries are still to be written to the journal."""
        return bool(self._unwritten)

    @property
    def behind(self) -> bool:
        """Whether a write has to be tried again."""
        return self.unwritten or self._status_failed

    def append(self, entry: Mapping[str, Any], durable: bool = True) -> None:
        """Append to the journal, in order. An entry that cannot be written now is tried again later."""
        self._unwritten.append((entry, durable))
        self._write_pending()

    def ended(self, ending: Ending) -> None:
        self.append({"k": "ended", **ending.to_json()})
        self.show(ending)

    def show(self, ending: Ending) -> None:
        """Write the status of a body that has ended."""
        self.status.phase, self.status.pid = "ended", None
        self.status.seq = max(self.status.seq, ending.seq)
        self.status.generation = ending.generation
        self.status.ending = ending.to_json()
        self.write_status()

    def write_status(self) -> None:
        self.status_due = None
        segments = self.log.segments
        self.status.log_segment = segments.number
        self.status.log_bytes, self.status.log_dropped = segments.written, segments.dropped
        self.status.log_dropped_lines = segments.dropped_lines
        try:
            task_files.write_json(os.path.join(self.directory, layout.STATUS), vars(self.status))
            self._status_failed = False
        except OSError:
            self._status_failed = True
            self.check()

    def try_again(self) -> None:
        self._write_pending()
        if self._status_failed:
            self.write_status()

    def check(self) -> None:
        if task_files.identity(self.directory) != self._identity:
            raise task_files.DirectoryGone(self.directory)

    def _write_pending(self) -> None:
        while self._unwritten:
            entry, durable = self._unwritten[0]
            try:
                self.journal.append(entry, durable=durable)
            except OSError:
                self.check()
                return
            del self._unwritten[0]
