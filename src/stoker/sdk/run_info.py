"""Information for a script about its run."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Dict, Optional, Set

from stoker.task import layout

IDENTITY = ("STOKER_TASK_DIR", "STOKER_GENERATION", "STOKER_CHECKPOINT_DIR")
"""Variables that say where the checkpoints of this process go."""
_LOOK_EVERY = 0.05
_warned: Set[str] = set()
_stop: Dict[str, Any] = {"seen": False, "next": 0.0}


def task_directory() -> Optional[str]:
    """The task directory; None outside Stoker."""
    return os.environ.get("STOKER_TASK_DIR") or None


def generation() -> int:
    try:
        return int(os.environ.get("STOKER_GENERATION", "0"))
    except ValueError:
        return 0


def identity() -> Dict[str, str]:
    """These variables for another process, which may have another working directory."""
    known = {name: os.environ[name] for name in IDENTITY if os.environ.get(name)}
    known["STOKER_CHECKPOINT_DIR"] = os.path.abspath(known.get("STOKER_CHECKPOINT_DIR", "checkpoints"))
    return known


def should_stop() -> bool:
    """Whether this run was asked to stop (`stoker stop`, a preemption). Then save and return within the grace period.

    Cheap enough for every step: the file is checked at most 20 times a second. Always False outside Stoker.

    >>> for step in range(3):
    ...     if should_stop():
    ...         break
    >>> step
    2
    """
    if _stop["seen"]:
        return True
    now = time.monotonic()
    if now < _stop["next"]:
        return False
    _stop["next"] = now + _LOOK_EVERY
    directory = task_directory()
    if directory is not None and os.path.exists(os.path.join(directory, layout.STOP)):
        _stop["seen"] = True
    return bool(_stop["seen"])


def params() -> Dict[str, Any]:
    """The parameters chosen for this run by a sweep or with `--param`; empty otherwise.

    >>> lr = params().get("lr", 0.1)
    >>> lr
    0.1
    """
    raw = os.environ.get("STOKER_PARAMS")
    if not raw:
        return {}
    try:
        value = json.loads(raw)
    except ValueError as exc:
        warn("params", f"STOKER_PARAMS is not JSON ({exc}); going on without parameters")
        return {}
    if not isinstance(value, dict):
        warn("params", f"STOKER_PARAMS is not a JSON object but {raw[:60]!r}; going on without parameters")
        return {}
    return value


def warn(about: str, message: str) -> None:
    """Print a warning on stderr, once for each `about`. It never raises: a report must not end the training."""
    if about in _warned:
        return
    _warned.add(about)
    try:
        sys.stderr.write(f"stoker: {message}\n")
    except (OSError, ValueError, AttributeError):
        pass  # stderr is closed or detached: there is no place for a warning.
