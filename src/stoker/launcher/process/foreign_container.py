"""A body that is a container of its own (`launcher: none` on this machine): the image runs as it is, without Stoker's code.

The launcher's child is only the command of the runtime, which has the container's output and exit code. Killing that command
does not end the container, so the container is removed afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from stoker.launcher.process.exit_reason import ExitFacts
from stoker.launcher.process.spawn import CannotStart

PATIENCE = 60.0
AGAIN = (0.0, 0.2, 1.0, 3.0)
"""Seconds before each try to remove it."""
CANNOT_RUN = 125
"""How podman and docker exit when the container was never started."""


class ForeignContainer:
    """Made from TaskInfo.container. Its calls block for as long as the runtime takes."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._name = str(known["name"])
        self._image = str(known["image"])
        self._run: List[str] = [str(word) for word in known["run"]]
        self._args: List[str] = [str(word) for word in known.get("args") or ()]
        self._client = {str(key): str(value) for key, value in known.get("client", {}).items()}
        self.limit: Optional[int] = known.get("memory")
        self.out_of_memory = False

    def command(self, argv: Sequence[str], env: Mapping[str, str]) -> Tuple[List[str], Dict[str, str]]:
        """The command that runs the container, and its environment. Values are passed by name, because other users can read a
        command line; only variables that the command needs itself, which are no secrets, are passed with their value."""
        words = list(self._run)
        for name in sorted(env):
            words += ["--env", f"{name}={env[name]}" if name in self._client else name]
        if argv:
            words += ["--entrypoint", argv[0]]
        return [*words, self._image, *(argv[1:] if argv else self._args)], {**env, **self._client}

    def before(self) -> None:
        """Remove the container of an earlier body of this task."""
        self._remove()

    def after(self) -> None:
        """The command has ended: read how the container ended, and remove it."""
        try:
            state = json.loads(self._runtime("container", "inspect", self._name))[0]["State"]
            self.out_of_memory = bool(state.get("OOMKilled"))
        except (ValueError, LookupError, TypeError, AttributeError):
            pass  # it was never made, or the runtime does not tell
        self._remove()

    def add_facts(self, facts: ExitFacts) -> None:
        """Add what is known of the container's end."""
        facts.limit = self.limit
        facts.oom_kills += self.out_of_memory
        status = facts.status
        if status is not None and os.WIFEXITED(status) and os.WEXITSTATUS(status) == CANNOT_RUN:
            last = facts.last_lines[-1] if facts.last_lines else "no reason was given"
            facts.failure = CannotStart(0, f"the container could not be started: {last}", CANNOT_RUN)

    def _remove(self) -> None:
        """Docker refuses it for a moment where a container ended before its start was recorded."""
        for pause in AGAIN:
            time.sleep(pause)
            self._runtime("rm", "--force", self._name)
            if not self._runtime("ps", "--all", "--quiet", "--filter", f"name=^{self._name}$").strip():
                return

    def _runtime(self, *words: str) -> str:
        try:
            done = subprocess.run(
                [self._run[0], *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=self._client,
                timeout=PATIENCE,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            # The engine removes the container when the launcher has ended.
            return ""
        return done.stdout.decode("utf-8", "replace")
