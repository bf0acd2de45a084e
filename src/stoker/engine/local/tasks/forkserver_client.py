"""The server's client of the fork server, a small process outside the server that starts launchers.

It is started once per server with one end of a socket pair, and ends when the other end is closed; launchers go on.
If it dies, the next request starts another one. The server uses only its command line, never its code: the server may
be newer than the launchers it finds.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker.engine.local.host.processes import Identity
from stoker.errors import EngineError

ANSWER_SECONDS = 30.0
"""Seconds without an answer after which the fork server counts as dead. A start takes milliseconds."""
BUNDLES = "bundle"
"""The launcher's code is unpacked here, in one directory per version."""
_PASSED_VARIABLES = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "USER",
    "LOGNAME",
    "PYTHONPATH",
)
"""Variables of the server's environment for the fork server. A task does not get them: its environment is in its order."""


class ForkServerDied(Exception):
    """It died before it answered: only the directory shows whether the launcher was started."""


class DirectoryTaken(Exception):
    """The launcher of an earlier request holds the directory: it will be recorded soon, or end."""


class ForkServerClient:
    """Created inside the event loop that uses it. `close` ends the process; launchers continue."""

    def __init__(
        self, directory: Path, *, open_files: tuple[int, int], cover: Mapping[str, Any] | None = None
    ) -> None:
        """`cover`: what is hidden from tasks with their own mount namespace (see `launcher/forkserver/home_cover.py`)."""
        self._directory = directory
        self._cover = cover
        self._open_files = open_files
        self.bundle: str | None = None
        """The directory of the unpacked launcher's code; created with the first fork server."""
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next = 0
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    async def ensure(self, wrap: Sequence[str] = ()) -> int:
        """Start a fork server if there is none; returns its pid. `wrap` is put before its command."""
        async with self._starting:
            if self._writer is None or self.pid is None or self._reading is None or self._reading.done():
                await self._stop()
                await self._start(wrap)
            assert self._process is not None
            return self._process.pid

    def _cover_but(self, shown: Sequence[str]) -> dict[str, Any] | None:
        if self._cover is None:
            return None
        return {**self._cover, "shown": [*self._cover["shown"], *([path, True] for path in shown)]}

    async def launch(
        self,
        directory: str,
        *,
        record: Path,
        task: Mapping[str, Any],
        pid_namespace: bool,
        user_namespace: bool,
        shown: Sequence[str] = (),
    ) -> Identity:
        """Start a launcher and record it, with its `task`, in the file `record`. `shown`: paths in the home that the task may
        write, beside its directory. Raises ForkServerDied,
        DirectoryTaken, or EngineError with the kernel's reason."""
        if self._writer is None:
            raise ForkServerDied
        self._next += 1
        number = self._next
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        request = {
            "id": number,
            "directory": directory,
            "pid_namespace": pid_namespace,
            "user_namespace": user_namespace,
            "cover": self._cover_but(shown),
            "record": str(record),
            "task": task,
        }
        try:
            self._writer.write(json.dumps(request).encode() + b"\n")
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._writer.drain()
                raw = await answer
        except (ConnectionError, TimeoutError) as exc:
            raise ForkServerDied from exc
        finally:
            self._answers.pop(number, None)
        if raw.get("taken"):
            raise DirectoryTaken
        if raw.get("error"):
            raise EngineError(f"the launcher could not be started: {raw['error']}")
        identity = Identity.from_json(raw)
        if identity is None:
            raise EngineError(f"the fork server sent an invalid answer: {raw!r}")
        return identity

    async def close(self) -> None:
        async with self._starting:
            await self._stop()

    # -- helpers ---------------------------------------------------------------------------------------------

    async def _start(self, wrap: Sequence[str]) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.bundle is None:
            self.bundle = await asyncio.to_thread(self._make_bundle)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            command = [
                *wrap,
                sys.executable,
                "-m",
                "stoker.launcher.forkserver.server",
                "--fd",
                str(theirs.fileno()),
            ]
            self._process = self._spawn([*command, "--bundle", self.bundle], theirs.fileno())
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader))

    def _spawn(self, command: list[str], fd: int) -> subprocess.Popen[bytes]:
        log = os.open(
            self._directory / "forkserver.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[fd],
                env=_environment(),
                cwd="/",
                start_new_session=True,
            )
        except OSError as exc:
            raise EngineError(f"cannot start the fork server: {exc}") from exc
        finally:
            os.close(log)
        if hasattr(resource, "prlimit"):
            # The server may have raised its own limit; tasks get the original one.
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, self._open_files)
        return process

    def _make_bundle(self) -> str:
        """Unpack the launcher's code for the Python of the tasks; returns its path."""
        done = subprocess.run(
            [sys.executable, "-m", "stoker.launcher.bundle", str(self._directory / BUNDLES)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=_environment(),
            cwd="/",
            check=False,
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise EngineError(
                f"cannot prepare the launcher in {self._directory / BUNDLES}: {last}",
                hint="Is the disk full or the home read-only?",
            )
        return done.stdout.strip()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                raw = json.loads(line)
                answer = self._answers.get(raw.get("id"))
                if answer is not None and not answer.done():
                    answer.set_result(raw)
        except (ConnectionError, ValueError):
            # Dead, or its answer is invalid: the next request starts another one.
            pass
        finally:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(ForkServerDied())
            if self._writer is not None:
                self._writer.close()

    async def _stop(self) -> None:
        if self._writer is not None:
            self._writer.close()
            try:
                await self._writer.wait_closed()
            except ConnectionError:
                pass
            self._writer = None
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None
        if self._process is not None:
            await asyncio.to_thread(_reap, self._process)
            self._process = None


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
