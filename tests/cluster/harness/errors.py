"""Errors while a test cluster is built, started or ended."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = ["HarnessError", "command"]


class HarnessError(Exception):
    """There can be no cluster; the message says what to do."""


def command(
    argv: Sequence[str | Path],
    *,
    input: str | None = None,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> str:
    """Run a short program and return its output; with `check`, a failure raises with its stderr."""
    done = subprocess.run(
        [str(part) for part in argv], input=input, capture_output=True, text=True, env=env, timeout=300
    )
    if check and done.returncode:
        line = " ".join(str(part) for part in argv)
        raise HarnessError(
            f"`{line}` ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-2000:]}"
        )
    return done.stdout
