"""A user's Stoker in a box: its own home, the real command line, the real server, the real engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.client.local import connect, running
from stoker.settings import Home
from stoker.spec.transitions import MISSING, STRICT
from support.waiting import wait

STOKER = [sys.executable, "-m", "stoker.cli.main"]
ENDED = ("succeeded", "failed", "stopped")


class Calls:
    """A client that connects anew for each call, so that it survives every restart of the server."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with connect(self._home) as client:
                return getattr(client, name)(*args, **kwargs)

        return call


class Box:
    """One home and one working directory. `close` ends the server and everything it started.

    `host`: the box whose home and server this one uses; then `release` ends only what runs there.
    """

    def __init__(self, root: Path, *, env: Mapping[str, str] | None = None, host: Box | None = None) -> None:
        self.root = root if host is None else host.root
        self.home = Home(self.root / "home")
        self.work = root / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        (self.root / "user").mkdir(exist_ok=True)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("STOKER_", "PYTEST_"))}
        path = f"{Path(sys.executable).parent}:{kept.get('PATH', '')}"
        own = {
            "STOKER_HOME": str(self.home.root),
            "HOME": str(self.root / "user"),
            "PATH": path,
            "NO_COLOR": "1",
        }
        own[STRICT] = "1"
        self.env = {**kept, **own, **(env or {})}

    def __call__(
        self,
        *args: str,
        code: int | None = 0,
        input: str | None = None,
        cwd: Path | None = None,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command and check its exit code (None: any)."""
        done = subprocess.run(
            [*STOKER, *args],
            cwd=cwd or self.work,
            env=self.env,
            input=input,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=None if input is not None else subprocess.DEVNULL,
        )
        if code is not None and done.returncode != code:
            raise AssertionError(
                f"stoker {' '.join(args)}: exit {done.returncode}, not {code}\n{done.stdout}\n{done.stderr}\n{self.server_log()}"
            )
        return done

    def json(self, *args: str, code: int | None = 0) -> Any:
        return json.loads(self(*args, "--json", code=code).stdout)

    def write(self, name: str, text: str) -> Path:
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def submit(self, *args: str) -> str:
        """Submit a detached run; returns the run id."""
        return str(json.loads(self("run", "-d", "--json", *args).stdout)["id"])

    def show(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = self.client().run(run)
        return found

    def until(self, run: str, *states: str, limit: float = 120) -> dict[str, Any]:
        return wait(lambda: self.show(run), lambda seen: seen["state"] in states, limit)

    def ended(self, run: str, limit: float = 120) -> dict[str, Any]:
        return self.until(run, *ENDED, limit=limit)

    def client(self) -> Calls:
        return Calls(self.home)

    def server_pid(self) -> int | None:
        record = running(self.home)
        return None if record is None else int(record["pid"])

    def server_log(self) -> str:
        with contextlib.suppress(OSError):
            return self.home.server_log.read_text()[-4000:]
        return ""

    def kill_server(self) -> bool:
        """kill -9, and wait until the server is gone. False: there was none."""
        pid = self.server_pid()
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait(lambda: self.server_pid() != pid)
        return True

    def launcher(self, run: str) -> int:
        """Process id of the launcher of the newest attempt."""
        # Directories that were set aside may be beside the attempts.
        found = [path for path in (self.home.tasks / run).iterdir() if path.name.isdecimal()]
        attempts = sorted(found, key=lambda path: int(path.name))
        return int(self.record(run, int(attempts[-1].name))["pid"])

    def record(self, run: str, attempt: int = 1, task: str = "worker-0") -> dict[str, Any]:
        """The engine's record of a task's launcher."""
        found: dict[str, Any] = json.loads(
            (self.home.engine / "tasks" / f"{run}.{attempt}.{task}.json").read_text()
        )
        return found

    def release(self) -> None:
        """End every run of the server, and wait until none holds a place."""
        live = self.client().runs(state=("queued", "starting", "running", "stopping"), limit=500)["runs"]
        for run in live:
            self.client().stop(run["id"], kill=True)
        wait(
            lambda: not self.client().runs(state=("starting", "running", "stopping"), limit=1)["runs"],
            limit=30,
        )

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.release()
            self.client().shutdown()
            wait(lambda: self.server_pid() is None, limit=30)
        self.kill_server()
        self._kill_launchers()
        with contextlib.suppress(FileNotFoundError):
            unexpected = [line for line in self.home.server_log.read_text().splitlines() if MISSING in line]
            assert unexpected == []

    def _kill_launchers(self) -> None:
        for record in (self.home.engine / "tasks").glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                known = json.loads(record.read_text())
                stat = Path(f"/proc/{known['pid']}/stat").read_text()
                if int(stat.rsplit(")", 1)[1].split()[19]) == known["start_time"]:
                    os.kill(known["pid"], signal.SIGKILL)
