"""Settles the files of a dead launcher, with the launcher's own code in a separate process."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from typing import Any, Dict, List

from stoker.task import formats

_COLLECT = """\
import json, sys
sys.path.insert(0, sys.argv[1])
from stoker.launcher.recovery import collect, salvage
from stoker.task.directory import StillHeld
try:
    if len(sys.argv) > 4:  # the list may be too long for the command line
        salvage(sys.argv[2], int(sys.argv[3]), json.load(sys.stdin))
    else:
        collect(sys.argv[2], int(sys.argv[3]))
    answer = {}
except StillHeld as exc:
    answer = {"errno": 16, "error": str(exc)}
except OSError as exc:
    answer = {"errno": exc.errno or 5, "error": exc.strerror or str(exc)}
print(json.dumps(answer))
"""
_LAST = 2000


def settle(directory: str, generation: int) -> Dict[str, Any]:
    """Settle a task directory. Raises OSError: an error of the recovery, or EBUSY if a launcher still runs."""
    return _run(directory, str(generation))


def salvage(directory: str, generation: int, carried: List[int]) -> Dict[str, Any]:
    """Salvage a part of a shared volume. Raises OSError."""
    return _run(directory, str(generation), "salvage", stdin=json.dumps(carried))


def _run(directory: str, *arguments: str, stdin: str = "") -> Dict[str, Any]:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(formats.__file__))))
    argv = [sys.executable, "-I", "-S", "-c", _COLLECT, root, directory, *arguments]
    began = time.monotonic()
    done = subprocess.run(argv, input=stdin.encode(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        text = done.stderr[-_LAST:].decode("utf-8", "replace")
        raise OSError(errno.EIO, f"the recovery ended with {done.returncode}: {text}", directory) from None
    if answer:
        raise OSError(answer["errno"], answer["error"], directory)
    return {"seconds": time.monotonic() - began}
