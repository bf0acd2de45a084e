"""A home, a real server and clients: the measured parts of Stoker."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.keeper import Kept
from bench.timing import environment
from stoker.client import Client
from stoker.client.local import read_token, serving
from stoker.settings import Home

START = 60.0
_OWN = ("-m stoker.server", "-m stoker.launcher.forkserver.server", "from stoker.sdk.writer_process import")


@dataclass(frozen=True)
class Ours:
    """A running server, and the environment in which the command line finds it."""

    home: Home
    env: Mapping[str, str]
    kept: Kept

    def processes(self) -> list[psutil.Process]:
        """The server, its fork server, the launchers and the writers of checkpoints, without any training."""
        found = []
        for process in psutil.Process(self.kept.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if any(name in command for name in _OWN):
                    found.append(process)
        return found

    def client(self) -> Client:
        record = serving(self.home)
        if record is None:
            raise RuntimeError(f"the server is gone: {self.kept.last_words()}")
        return Client(str(record["url"]), read_token(self.home))


def stoker() -> str:
    """The console script that users start."""
    path = Path(sys.executable).parent / "stoker"
    if not path.exists():
        raise RuntimeError(f"{path} is not there; `make setup` installs it")
    return str(path)


@contextlib.contextmanager
def server(
    root: Path,
    *,
    config: str = "",
    argv: Sequence[str] = ("-m", "stoker.server"),
    path: Path | None = None,
) -> Iterator[Ours]:
    """Start a server below `root`; at the end it is stopped with everything it started. `path`: the
    modules of `argv`."""
    home = Home(root / "home")
    home.root.mkdir(parents=True)
    home.config.write_text(config)
    user = root / "user"
    user.mkdir()
    env = environment(user, STOKER_HOME=str(home.root))
    command = [sys.executable, *argv, "--home", str(home.root)]
    with Kept(command, log=root / "server.out", env=env, cwd=path or root) as kept:
        deadline = time.monotonic() + START
        while serving(home) is None:
            kept.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {kept.last_words()}")
            time.sleep(0.02)
        ours = Ours(home, env, kept)
        with ours.client() as client:
            client.server()
        yield ours
