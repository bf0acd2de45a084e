"""Metrics: one line per report, appended with one write to a file that only this process writes.

No connection, no thread, no buffer: a report is in the file when the call returns, even if the process is killed right
after. The reader merges the files of all processes of a task.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any, Dict, Optional

from stoker.sdk import run_info
from stoker.task import layout

_FLOAT_MAX = 1.7976931348623157e308


class Reporter:
    """One per process; a forked child has a new one. May be called from any thread."""

    def __init__(self) -> None:
        # Re-entrant: a signal handler may report in the middle of a report.
        self._lock = threading.RLock()
        self._fd: Optional[int] = None
        self._ready = False
        self._torn = False
        self._step = -1
        self._names: Dict[str, str] = {}

    def report(self, step: Any, values: Dict[str, Any]) -> None:
        if not self._ready:
            self._open()
        with self._lock:
            number = self._step + 1 if step is None else step if type(step) is int else self._whole(step)
            self._step = number
            if self._fd is None:
                return
            parts = []
            for name, value in values.items():
                text = self._number(name, value)
                if text is not None:
                    parts.append(f"{self._names.get(name) or self._quoted(name)}:{text}")
            if parts:
                self._write(f'{{"step":{number},"t":{time.time():.3f},"v":{{{",".join(parts)}}}}}\n')

    def _number(self, name: str, value: Any) -> Optional[str]:
        kind = type(value)
        if kind is not float:
            if kind is int and -_FLOAT_MAX < value < _FLOAT_MAX:
                return repr(value)
            try:
                if isinstance(value, (str, bytes, bytearray)):
                    raise TypeError("text is not a number")
                value = float(value)
            except Exception as exc:  # noqa: BLE001 - a foreign type's float() may raise anything; training goes on
                run_info.warn(
                    f"value {name}", f"report: {name} is left out, {kind.__name__} is not one number ({exc})"
                )
                return None
        if value - value == 0.0:
            return repr(value)
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"

    def _whole(self, step: Any) -> int:
        try:
            return int(step)
        except Exception as exc:  # noqa: BLE001 - as above
            run_info.warn(
                "step",
                f"report: step={step!r} is not a whole number ({exc}); counting continues from {self._step}",
            )
            return self._step + 1

    def _quoted(self, name: str) -> str:
        quoted = self._names[name] = json.dumps(name)
        return quoted

    def _write(self, line: str) -> None:
        data = line.encode()
        try:
            if self._torn:
                data = b"\n" + data
            written = os.write(self._fd or 0, data)
            self._torn = written != len(data)
        except OSError as exc:
            run_info.warn("write", f"report: metrics cannot be written ({exc}); going on without them")

    def _open(self) -> None:
        with self._lock:
            directory = run_info.task_directory()
            if self._ready or directory is None:
                self._ready = True
                return
            # The rank is in the name of the file, so that values of several processes of a task stay apart.
            rank = os.environ.get("LOCAL_RANK", "0")
            tail = f"-{int(rank)}" if rank.isascii() and rank.isdigit() and 0 < int(rank) < 10000 else ""
            name = f"{run_info.generation()}-{os.getpid()}-{os.urandom(4).hex()}{tail}.jsonl"
            path = os.path.join(directory, layout.METRICS, name)
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                self._fd = os.open(
                    path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644
                )
            except OSError as exc:
                run_info.warn("open", f"report: metrics cannot be written ({exc}); going on without them")
            self._ready = True

    def forked(self) -> "Reporter":
        """The reporter of a forked child: it continues to count steps and writes its own file."""
        child = Reporter()
        child._step = self._step
        if self._fd is not None:
            os.close(self._fd)
        return child


_reporter = Reporter()


def report(step: Optional[int] = None, **values: Any) -> None:
    """Report values of this step: `report(step=100, loss=0.25, accuracy=0.9)`.

    Values are numbers, or anything that `float()` takes: scalars of NumPy, torch, JAX, TensorFlow. NaN and
    infinities are kept. Without `step`, steps are counted from 0. A call costs some microseconds, never waits for
    a network and never raises: a value that cannot be reported is named once on stderr. Outside Stoker it does nothing.

    >>> for epoch in range(3):
    ...     report(step=epoch, loss=1.0 / (epoch + 1))
    """
    _reporter.report(step, values)


def _after_fork() -> None:
    global _reporter
    _reporter = _reporter.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
