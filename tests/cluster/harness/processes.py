"""Processes that outlive the program that started them: recorded and ended by process id and start time.

A process id may be used again; id and start time together are unique. Each process also has the cluster's
directory in its environment, and its children inherit it unless they set their own environment. So
processes started just before a crash, or by one of ours (a shim), are found as well.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError
from harness.layout import locked

__all__ = ["MARK", "NICENESS", "Ledger", "Process", "kill", "marked", "start_time"]

MARK = "STOKER_CLUSTER_RUN"
NICENESS = "-5"
"""The nodes' agents get a higher priority, so they respond while the tests keep the machine busy."""


def start_time(pid: int) -> int | None:
    """The start time of a process in ticks since boot; None if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@dataclass(frozen=True)
class Process:
    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        start = start_time(pid)
        return None if start is None else cls(pid, start)

    @property
    def alive(self) -> bool:
        return start_time(self.pid) == self.start

    def send(self, number: signal.Signals) -> bool:
        """Signal this process; False when it has ended."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.alive:
                return False
            signal.pidfd_send_signal(handle, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)

    def wait(self, timeout: float | None) -> bool:
        """Whether it ended within `timeout` seconds; it need not be a child of this process."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.alive:
                return True
            poller = select.poll()
            poller.register(handle, select.POLLIN)
            return bool(poller.poll(None if timeout is None else timeout * 1000))
        finally:
            os.close(handle)
            self._reap()

    def _reap(self) -> None:
        try:
            os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            pass


def kill(processes: Iterable[Process]) -> None:
    """Kill them, and wait until they have ended."""
    told = [process for process in processes if process.send(signal.SIGKILL)]
    for process in told:
        if not process.wait(30):
            raise HarnessError(f"process {process.pid} does not end")


def marked(root: Path) -> list[Process]:
    """Every process that has the cluster at `root` in its environment."""
    mark = f"{MARK}={root}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = Path(entry.path, "environ").read_bytes()
        except OSError:
            continue
        if mark in environment.split(b"\0") and (process := Process.of(int(entry.name))):
            found.append(process)
    return found


class Ledger:
    """The processes of one cluster, by name, in a file. Only one program at a time may change it."""

    def __init__(self, path: Path, logs: Path) -> None:
        self._path = path
        self._logs = logs

    def start(
        self, name: str, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None
    ) -> Process:
        if (running := self.find(name)) and running.alive:
            raise HarnessError(f"{name} is already running as {running.pid}")
        self._logs.mkdir(parents=True, exist_ok=True)
        with open(self._logs / f"{name}.log", "ab") as log:
            child = subprocess.Popen(
                [str(part) for part in argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **(env or {}), MARK: str(self._path.parent)},
            )
        # The child may outlive this program; its zombie is reaped in `wait`, or by init.
        child.returncode = 0
        process = Process.of(child.pid)
        if process is None:
            raise HarnessError(f"{name} did not start:\n{self.tail(name)}")
        self.note(f"process.{name}", [process.pid, process.start])
        return process

    def find(self, name: str) -> Process | None:
        return self.all().get(name)

    def all(self) -> dict[str, Process]:
        prefix = "process."
        return {
            key.removeprefix(prefix): Process(*value)
            for key, value in self.read().items()
            if key.startswith(prefix) and isinstance(value, list)
        }

    def kill(self, name: str) -> None:
        """Kill the process and forget it."""
        if process := self.find(name):
            kill([process])
            self.note(f"process.{name}", None)

    def tail(self, name: str, lines: int = 25) -> str:
        path = self._logs / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def note(self, key: str, value: object) -> None:
        """Store `value` in the state file; None removes it. Several programs may do this at once."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._path.with_suffix(".lock")):
            state = self.read()
            if value is None:
                state.pop(key, None)
            else:
                state[key] = value
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(state, indent=1))
            new.replace(self._path)

    def read(self) -> dict[str, object]:
        try:
            state: dict[str, object] = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        return state
