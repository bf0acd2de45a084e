"""Decides how a body ended: from the facts that the launcher observed to one `Ending`. Pure, except for `full_disks`."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass, field
from typing import Any, Iterable, List, Mapping, Optional

from stoker.launcher.process.spawn import CannotStart
from stoker.task.formats import Ending, Order
from stoker.task.units import readable_size

PEER = "peer"
"""The other processes were ended because one had failed; its end is the body's."""

FULL_DISK = ("no space left on device", "disk quota exceeded", "errno 28]", "errno 122]")


@dataclass
class ExitFacts:
    """What is known when the last process has ended."""

    setup: bool = False
    """The setup ended, not the training."""
    failure: Optional[CannotStart] = None
    status: Optional[int] = None
    """Wait status of the main process; of several, of the one that failed first."""
    process: Optional[int] = None
    """Local rank of that process, where there are several."""
    why: Optional[str] = None
    """Why the launcher ended it: stop | timeout | memory | pids | peer; None: it ended by itself."""
    reason: str = ""
    """Message for a stop, where there is one."""
    timeout: Optional[float] = None
    oom_kills: int = 0
    limit_reached: bool = False
    """It reached its memory limit, on a kernel that does not count out-of-memory kills."""
    limit: Optional[int] = None
    pids: Optional[int] = None
    peak: Optional[int] = None
    seconds: float = 0.0
    at: float = 0.0
    last_lines: List[str] = field(default_factory=list)
    full: List[str] = field(default_factory=list)
    """Paths on full disks, for a body whose last lines complain of a full disk."""


@dataclass
class Memory:
    """What is known of the memory of a body that has ended."""

    group: str = ""
    """Identifies the control group."""
    kills: int = 0
    limit: Optional[int] = None
    peak: Optional[int] = None


def ending(order: Order, facts: ExitFacts) -> Ending:
    """The ending. An order to stop takes precedence over a limit, and a limit over the exit code."""
    result = Ending(
        seq=order.seq, generation=order.generation, kind="exit", at=facts.at, seconds=facts.seconds
    )
    result.process = facts.process
    result.last_lines = facts.last_lines
    _read_status(result, facts)
    stage = "the setup" if facts.setup else "the process"
    if facts.failure is not None:
        _failed_to_start(result, facts, facts.failure)
    elif facts.why == "stop":
        result.kind = "stopped"
        result.message = facts.reason
    elif facts.why == "timeout":
        result.kind = "timeout"
        result.message = f"ran longer than its timeout of {facts.timeout:g} s"
    elif facts.why == "memory" or _out_of_memory(result, facts):
        result.kind = "oom"
        result.limit, result.peak = facts.limit, facts.peak
        result.message = f"{stage} used more memory than its limit of {_bytes(facts.limit)}"
    elif facts.why == "pids":
        result.kind = "signal"
        result.message = f"more than {facts.pids} processes"
    elif facts.setup:
        result.kind = "setup"
        result.message = f"the setup command ended with {_outcome(result)}"
    elif result.code and facts.full:
        result.kind = "disk"
        result.message = f"no space left on {', '.join(facts.full)}"
    elif facts.oom_kills:
        result.limit, result.peak = facts.limit, facts.peak
        result.message = f"one of its processes was killed at the memory limit of {_bytes(facts.limit)} while the others ran on"
    if result.kind in ("exit", "signal") and not result.message:
        if result.process is not None:
            result.message = f"process {result.process} ended with {_outcome(result)}"
        elif result.signal:
            result.message = f"ended by {_outcome(result)}"
    return result


def lost(started: Mapping[str, Any], at: float, memory: Optional[Memory] = None) -> Ending:
    """The ending of a body whose launcher has died: how it ended is not known, so it is not started again.

    `memory`: read by the next launcher. In the same control group, the kernel's count of out-of-memory kills shows whether the
    limit was the cause. In a restarted container only the engine knows that; the last peak is evidence then.
    """
    result = Ending(
        seq=int(started["seq"]),
        generation=int(started.get("generation", 0)),
        kind="lost",
        message="the launcher ended before the body did",
        at=at,
    )
    if memory is not None:
        result.limit, result.peak = memory.limit, memory.peak
        if _killed_since(started.get("memory"), memory):
            result.kind = "oom"
            result.message = f"the task used more memory than its limit of {_bytes(memory.limit)}"
    return result


def _killed_since(before: Any, memory: Memory) -> bool:
    """Whether the kernel has killed in the same group since. Every value is checked, as user code can write the journal."""
    if not isinstance(before, dict) or not isinstance(before.get("kills"), int):
        return False
    return before.get("group") == memory.group != "" and memory.kills > before["kills"]


def _out_of_memory(result: Ending, facts: ExitFacts) -> bool:
    killed = result.signal == signal.SIGKILL
    return bool(facts.oom_kills and (result.code or killed)) or (facts.limit_reached and killed)


def complains_of_disk(lines: Iterable[str]) -> bool:
    return any(words in line.lower() for line in lines for words in FULL_DISK)


def full_disks(directory: str, env: Mapping[str, str]) -> List[str]:
    """The directories that a training usually writes to and whose disk is full."""
    places = [directory, env.get("TMPDIR") or "/tmp", "/dev/shm", env.get("HOME") or ""]
    found: List[str] = []
    seen = set()
    for place in places:
        try:
            device, room = os.stat(place).st_dev, os.statvfs(place)
        except OSError:
            continue
        if device not in seen and room.f_blocks and room.f_bavail * room.f_frsize < 1 << 20:
            found.append(place)
        seen.add(device)
    return found


def _read_status(result: Ending, facts: ExitFacts) -> None:
    if facts.status is None:
        return
    if os.WIFSIGNALED(facts.status):
        result.kind, result.signal = "signal", os.WTERMSIG(facts.status)
    else:
        result.code = os.WEXITSTATUS(facts.status)


def _failed_to_start(result: Ending, facts: ExitFacts, failure: CannotStart) -> None:
    full = failure.errno in (errno.ENOSPC, errno.EDQUOT)
    result.kind = "disk" if full else "setup" if facts.setup else "start-failed"
    result.code = failure.code
    result.message = failure.message


def _outcome(result: Ending) -> str:
    if result.signal is None:
        return f"code {result.code}"
    try:
        return signal.Signals(result.signal).name
    except ValueError:
        return f"signal {result.signal}"


def _bytes(count: Optional[int]) -> str:
    return "unknown size" if count is None else readable_size(count)
