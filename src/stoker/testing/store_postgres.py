"""A private PostgreSQL server from the installed programs, for tests and benchmarks.

It listens only on a socket in its own directory, trusts every client, and ends with the process that started it. For
root it runs as another user, because PostgreSQL refuses root.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

import psycopg
from psycopg import conninfo

START_LIMIT = 120.0
_SETTINGS = """
listen_addresses = ''
unix_socket_directories = '{root}'
max_connections = 60
shared_buffers = 32MB
dynamic_shared_memory_type = posix
log_min_messages = warning
fsync = {fsync}
full_page_writes = {fsync}
"""


class PostgresServer:
    """A context manager, or `start` and `close`. Raises FileNotFoundError where PostgreSQL is not installed."""

    def __init__(self, *, fsync: bool = False) -> None:
        self._programs = programs()
        self._fsync = fsync
        self._process: subprocess.Popen[bytes] | None = None
        self._names = itertools.count()
        self.root = Path()

    def start(self) -> None:
        """Creates the database cluster and starts the server."""
        self.root = Path(tempfile.mkdtemp(prefix="stoker-pg-"))
        if os.geteuid() == 0:
            user = _server_user()
            os.chown(self.root, user.pw_uid, user.pw_gid)
        # A collation that is not by bytes, as on most servers: the store must give the same results.
        made = ["--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=en-US"]
        command = [
            self._program("initdb"),
            "-D",
            self._data,
            "-U",
            "stoker",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "-N",
        ]
        subprocess.run(_as_server_user([*command, *made]), check=True, capture_output=True, cwd="/")
        with open(f"{self._data}/postgresql.conf", "a") as file:
            file.write(_SETTINGS.format(root=self.root, fsync="on" if self._fsync else "off"))
        self.resume()

    def resume(self) -> None:
        """Starts the server that was created before."""
        with open(self.root / "log", "ab") as log_file:
            command = _as_server_user([self._program("postgres"), "-D", self._data])
            self._process = subprocess.Popen(command, stdout=log_file, stderr=log_file, cwd="/")
        self.wait()

    def wait(self) -> None:
        """Waits until it answers."""
        deadline = time.monotonic() + START_LIMIT
        while True:
            try:
                psycopg.connect(self.url("postgres")).close()
                return
            except psycopg.OperationalError:
                log = (self.root / "log").read_text()[-2000:]
                if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"PostgreSQL does not start: {log}") from None
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT ends it in order, SIGQUIT at once, as a crash does."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=START_LIMIT)
            self._process = None

    def crash(self) -> None:
        """Cuts off all clients and finishes no transaction; the server has to recover."""
        self.stop(signal.SIGQUIT)
        self.resume()

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.root, ignore_errors=True)

    def url(self, database: str) -> str:
        return f"postgresql://stoker@/{database}?host={self.root}"

    def fresh(self) -> str:
        """The URL of a new, empty database."""
        name = f"test_{os.getpid()}_{next(self._names)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def execute(self, statement: str, url: str | None = None) -> list[tuple[object, ...]]:
        """Runs a statement as administrator; again while the server is recovering."""
        deadline = time.monotonic() + START_LIMIT
        while True:
            try:
                with contextlib.closing(
                    psycopg.connect(url or self.url("postgres"), autocommit=True)
                ) as found:
                    cursor = found.execute(statement.encode())
                    return cursor.fetchall() if cursor.description else []
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def backends(self, url: str) -> list[int]:
        """Process ids of the backends that serve stores on this database."""
        name = conninfo.conninfo_to_dict(url)["dbname"]
        found = self.execute(
            f"SELECT pid FROM pg_stat_activity WHERE datname = '{name}' AND application_name = 'stoker'"
        )
        return [int(str(pid)) for (pid,) in found]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _data(self) -> str:
        return f"{self.root}/data"

    def _program(self, name: str) -> str:
        return str(self._programs / name)


def programs() -> Path:
    """The directory of the server's programs."""
    on_path = shutil.which("postgres")
    if on_path:
        return Path(on_path).parent
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if not found:
        raise FileNotFoundError("no PostgreSQL server is installed: apt-get install postgresql")
    return max(found, key=lambda path: int(path.parent.name))


def _server_user() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return pwd.getpwuid(os.geteuid())


def _as_server_user(command: list[str]) -> list[str]:
    prefix = ["setpriv", "--pdeathsig", "INT"]
    if os.geteuid() == 0:
        user = _server_user()
        prefix += [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    return [*prefix, *command]
