"""A body that is a container of its own (`launcher: none` on this machine): the image runs as it is, nothing of ours
is in it, and the process we start is only the runtime's command, which says what it says and ends as it ends.

Killing that command ends nothing, so whoever ran it has the container removed afterwards.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from stoker.launcher.process.exit_reason import ExitFacts
from stoker.launcher.process.spawn import CannotStart

PATIENCE = 60.0
CANNOT_RUN = 125
"""How podman and docker exit when the container was never started."""


class ForeignContainer:
    """Made from TaskInfo.container. Blocks for as long as the runtime takes, which is what the body's end takes here."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._name = str(known["name"])
        self._image = str(known["image"])
        self._run: List[str] = [str(word) for word in known["run"]]
        self._args: List[str] = [str(word) for word in known.get("args") or ()]
        self._client = {str(key): str(value) for key, value in known.get("client", {}).items()}
        self.limit: Optional[int] = known.get("memory")
        self.out_of_memory = False

    def command(self, argv: Sequence[str], env: Mapping[str, str]) -> Tuple[List[str], Dict[str, str]]:
        """The command that runs it, and that command's environment. Values go by name: others can read a command line.
        Those that the command itself needs for its own are no secrets."""
        words = list(self._run)
        for name in sorted(env):
            words += ["--env", f"{name}={env[name]}" if name in self._client else name]
        if argv:
            words += ["--entrypoint", argv[0]]
        return [*words, self._image, *(argv[1:] if argv else self._args)], {**env, **self._client}

    def before(self) -> None:
        """What an earlier body of this task left."""
        self._ask("rm", "--force", self._name)

    def after(self) -> None:
        """The command has ended: note how the container went, and see that it is gone."""
        try:
            state = json.loads(self._ask("container", "inspect", self._name))[0]["State"]
            self.out_of_memory = bool(state.get("OOMKilled"))
        except (ValueError, LookupError, TypeError, AttributeError):
            pass  # it was never made, or the runtime does not say
        self._ask("rm", "--force", self._name)

    def tell(self, facts: ExitFacts) -> None:
        """What is known of the container's end."""
        facts.limit = self.limit
        facts.oom_kills += self.out_of_memory
        status = facts.status
        if status is not None and os.WIFEXITED(status) and os.WEXITSTATUS(status) == CANNOT_RUN:
            last = facts.last_lines[-1] if facts.last_lines else "no reason was given"
            facts.failure = CannotStart(0, f"the container could not be started: {last}", CANNOT_RUN)

    def _ask(self, *words: str) -> str:
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
            # The engine removes it when the launcher is gone.
            return ""
        return done.stdout.decode("utf-8", "replace")
