"""Commands timed in turns: in each round every contender runs once, in a changing order, so that a
disturbance of the machine affects all of them."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LIMIT = 300.0
"""Seconds that one command may take before the benchmark gives up on it."""
_HIDDEN = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_QUIET = {
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    "NO_COLOR": "1",
}
"""Disables usage reports of peers, so that no command waits for one."""


@dataclass(frozen=True)
class Contender:
    """A command to time. `every`: takes part in each n-th round only, for those that take seconds."""

    name: str
    argv: Sequence[str]
    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict)
    every: int = 1


def environment(home: Path, **extra: str) -> dict[str, str]:
    """The environment of a user's shell, with its own home directory."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _HIDDEN and not name.startswith(("STOKER_", "PYTEST_", "COV_"))
    }
    return {**kept, **_QUIET, "HOME": str(home), **extra}


def in_turns(contenders: Sequence[Contender], rounds: int, *, seed: int = 7) -> dict[str, list[float | None]]:
    """Milliseconds by contender and round; None for rounds it did not take part in. Each runs once
    before, unmeasured, so that files are in memory and bytecode is written."""
    for contender in contenders:
        seconds(contender)
    order = random.Random(seed)
    times: dict[str, list[float | None]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        turn = list(contenders)
        order.shuffle(turn)
        for contender in turn:
            takes_part = number % contender.every == 0
            times[contender.name].append(seconds(contender) * 1000 if takes_part else None)
    return times


def seconds(contender: Contender) -> float:
    """From its start to its end. A failed command is no measurement: RuntimeError."""
    with tempfile.TemporaryFile() as said:
        begin = time.perf_counter()
        process = subprocess.Popen(
            contender.argv,
            cwd=contender.cwd,
            env=contender.env or None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
        # A wait with a timeout polls up to 50 ms apart, which would be measured.
        watchdog = threading.Timer(LIMIT, process.kill)
        watchdog.start()
        status = process.wait()
        took = time.perf_counter() - begin
        watchdog.cancel()
        if status != 0:
            said.seek(0)
            text = said.read().decode(errors="replace").strip()[-500:]
            raise RuntimeError(f"{contender.name} ended with status {status}: {text}")
    return took
