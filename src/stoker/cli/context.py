"""What every command is given: the streams, their style, and the connection to the server."""

from __future__ import annotations

import os
import sys
from typing import IO, TYPE_CHECKING, Any

from stoker.cli.rendering import terminal
from stoker.errors import NotFound, ServerUnreachable, StokerError

if TYPE_CHECKING:
    from stoker.client import Client
    from stoker.settings import Home


class Context:
    """One invocation. Data goes to `out`, everything else to `err`; tests may replace both."""

    def __init__(self, out: IO[str], err: IO[str], stdin: IO[str] | None = None) -> None:
        self.out = out
        self.err = err
        self.stdin = stdin
        self.out_color = terminal.wants_color(out)
        self.err_color = terminal.wants_color(err)
        self._client: Client | None = None
        self._opened: list[Client] = []

    @classmethod
    def from_environment(cls) -> Context:
        for stream in (sys.stdout, sys.stderr):
            # A C locale must not turn a name with an accent into a traceback.
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        return cls(sys.stdout, sys.stderr, sys.stdin)

    # -- the server ------------------------------------------------------------------------------------------

    @property
    def home(self) -> Home:
        from stoker.settings import Home

        return Home.from_environment()

    @property
    def client(self) -> Client:
        """The user's server, started if it does not run."""
        if self._client is None:
            self._client = self.connect()
        return self._client

    def connect(self, *, autostart: bool = True) -> Client:
        """A separate connection: for a second thread, or after the server went away."""
        from stoker.client.local import connect  # lazy: help and mistakes need no client

        client = connect(self.home, autostart=autostart)
        self._opened.append(client)
        return client

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()

    def reconnect(self) -> Client:
        self._client = self.connect()
        return self._client

    # -- printing --------------------------------------------------------------------------------------------

    def set_color(self, when: str) -> None:
        if when != "auto":
            self.out_color = self.err_color = when == "always"

    @property
    def interactive(self) -> bool:
        """Whether a user can be asked a question."""
        return self.stdin is not None and terminal.is_terminal(self.stdin) and terminal.is_terminal(self.err)

    @property
    def columns(self) -> int | None:
        return terminal.columns(self.out)

    def print(self, line: str = "") -> None:
        self.out.write(line + "\n")

    def json(self, value: Any) -> None:
        """ASCII only, so that escapes, bidi marks and control characters cannot reach a terminal."""
        import json

        json.dump(value, self.out, indent=2)
        self.out.write("\n")

    def style(self, text: str, *names: str) -> str:
        return terminal.style(text, *names, on=self.out_color)

    def note(self, text: str) -> None:
        """A message beside the data. `text` must be safe."""
        self.err.write(text + "\n")
        self.err.flush()

    def warn(self, text: str) -> None:
        self.note(f"{terminal.style('warning', 'yellow', 'bold', on=self.err_color)}: {text}")

    def fail(self, exc: StokerError) -> None:
        label = terminal.style("error", "red", "bold", on=self.err_color)
        first, *rest = terminal.safe_lines(exc.message)
        self.note("\n".join([f"{label}: {first}", *(f"  {line}" for line in rest)]))
        if exc.hint:
            hint = terminal.style("hint", "cyan", "bold", on=self.err_color)
            self.note("\n" + f"{hint}: " + "\n      ".join(terminal.safe_lines(exc.hint)))

    @staticmethod
    def exit_code(exc: StokerError) -> int:
        if isinstance(exc, NotFound):
            return 3
        if isinstance(exc, ServerUnreachable):
            return 4
        return exc.exit_code

    def abandon_output(self) -> None:
        """Redirects stdout to /dev/null. Its reader has gone, and the interpreter's last flush would complain."""
        try:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self.out.fileno())
        except (OSError, ValueError):
            return
