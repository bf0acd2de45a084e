"""`setup:` run once per content of its inputs, and used by every task that asks for the same.

The launcher's side: who builds, who waits, and what the body's environment gains. The building itself is done
by `makeenv.py` in a process of its own, under the body's limits. A directory counts only when `.complete` is
in it, and that is written last: a build that is killed is built again from nothing.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from typing import Dict, List, Mapping, Optional

from stoker.launcher.process import build_env


class Setup:
    """The lock is an flock on `DIRECTORY.lock`, shared with the processes that build: it is free again only
    when no builder is left, or when the launcher, having ended them all, says so (`finish`)."""

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
        """The setup left files in the working directory, which a new one must get too."""
        try:
            return bool(os.listdir(os.path.join(self.directory, build_env.WORKDIR)))
        except OSError:
            return False

    def acquire(self) -> Optional[str]:
        """`cached`, or `build` with the lock held; None: somebody else is building it now."""
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
        """Descriptors that the builders hold on to: the lock."""
        return [self.lock] if self.lock >= 0 else []

    def argv(self) -> List[str]:
        """The helper process that does it, run by the launcher's own interpreter."""
        script = os.path.abspath(build_env.__file__)
        action = "restore" if self.cached else "build"
        return [sys.executable, "-I", "-S", script, action, self.directory, self.code, self.command]

    def activated(self, env: Mapping[str, str]) -> Dict[str, str]:
        return build_env.activated(self.directory, env)

    def finish(self, built: bool) -> None:
        """Let the others go on. Of a build that failed nothing stays."""
        if self.lock < 0:
            return
        if not built and not self.complete:
            shutil.rmtree(self.directory, ignore_errors=True)
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        os.close(self.lock)
        self.lock = -1
