"""Progress messages on stderr: stdout is for the table."""

from __future__ import annotations

import sys
import time

_BEGIN = time.monotonic()


def say(text: str) -> None:
    sys.stderr.write(f"[{time.monotonic() - _BEGIN:6.1f} s] {text}\n")
    sys.stderr.flush()
