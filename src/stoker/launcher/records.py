"""What a launcher writes down: the journal and the status, in order, and again when there was no room."""

from __future__ import annotations

import os
from typing import Any, List, Mapping, Optional, Tuple

from stoker.launcher import task_files
from stoker.launcher.journal import Journal
from stoker.launcher.telemetry.output_log import OutputLog
from stoker.linux import syscalls
from stoker.task import layout
from stoker.task.formats import Ending, Status


class Records:
    """One per launcher, used from its one thread. Raises DirectoryGone when nobody wants them any more."""

    def __init__(self, directory: str, log: OutputLog) -> None:
        self.directory = directory
        self.journal = Journal(directory)
        self.log = log
        self.status = Status(phase="ready", launcher_pid=os.getpid(), boot_id=syscalls.boot_id())
        self.status.version = task_files.version()
        self.status_due: Optional[float] = None
        """When the status is to be written, at the latest."""
        self._identity = task_files.identity(directory)
        self._unwritten: List[Tuple[Mapping[str, Any], bool]] = []
        self._status_failed = False

    @property
    def unwritten(self) -> bool:
        """The journal has not everything yet."""
        return bool(self._unwritten)

    @property
    def behind(self) -> bool:
        """There is something to try again."""
        return self.unwritten or self._status_failed

    def append(self, entry: Mapping[str, Any], durable: bool = True) -> None:
        """To the journal, in order; what finds no room now is written when there is some."""
        self._unwritten.append((entry, durable))
        self._write_pending()

    def ended(self, ending: Ending) -> None:
        self.append({"k": "ended", **ending.to_json()})
        self.show(ending)

    def show(self, ending: Ending) -> None:
        """The status of a body that has ended."""
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
