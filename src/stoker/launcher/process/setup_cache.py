"""The cache of setups: a `setup:` runs once per content of its inputs, and its result is used by every task with the same.

This is the launcher's side: it takes the lock or waits, and activates the result for the body. `build_env.py` builds, in a
process of its own, under the body's limits. A directory counts only when `.complete` is in it, which is written last: a build
that was killed is started again from nothing.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from typing import Dict, List, Mapping, Optional

from stoker.launcher.process import build_env


class Setup:
    """The lock is an flock on `DIRECTORY.lock`, which the building processes inherit. It is released when none of them is left,
    or by the launcher when it has ended them all (`finish`)."""

    def __init__(self, command: str, directory: str, code: str) -> None:
        self.command = command
        self.directory = directory
        self.code = code
        self.lock = -1
        self.cached = False

    @property
    def complete(self) -> bool:
        return os.path.exists(os.path.join(self.directory, build_env.COMPLETE))

    @property
    def has_files(self) -> bool:
        """Whether the setup made files in the working directory, which have to be copied to every new one."""
        try:
            return bool(os.listdir(os.path.join(self.directory, build_env.WORKDIR)))
        except OSError:
            return False

    def acquire(self) -> Optional[str]:
        """`cached`, or `build` with the lock held; None: another task is building it now."""
        if self.complete:
            return "cached"
        if self.lock < 0:
            os.makedirs(os.path.dirname(self.directory), exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self.lock = os.open(f"{self.directory}.lock", flags, 0o600)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return "cached" if self.complete else "build"

    @property
    def kept(self) -> List[int]:
        """Descriptors that the builders inherit: the lock."""
        return [self.lock] if self.lock >= 0 else []

    def argv(self) -> List[str]:
        """The command that builds or restores, run by the launcher's own interpreter."""
        script = os.path.abspath(build_env.__file__)
        action = "restore" if self.cached else "build"
        return [sys.executable, "-I", "-S", script, action, self.directory, self.code, self.command]

    def activated(self, env: Mapping[str, str]) -> Dict[str, str]:
        return build_env.activated(self.directory, env)

    def finish(self, built: bool) -> None:
        """Release the lock. A failed build is removed."""
        if self.lock < 0:
            return
        if not built and not self.complete:
            shutil.rmtree(self.directory, ignore_errors=True)
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        os.close(self.lock)
        self.lock = -1
