"""`remote-shell ADDRESS PORT`: takes the place of sshd in the tasks of one world.

It runs the commands of clients with the world's key (STOKER_WORLD_KEY), each in a process group of its own, in this task's
environment and directory. On SIGTERM it accepts no more commands and waits for those that run: the mpirun that started them
gets SIGTERM too, and ends them in order.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any, Dict, List, Optional

from stoker.launcher.helpers import rsh_protocol as wire

KEY = "STOKER_WORLD_KEY"
PLACES = (
    "OMPI_MCA_orte_tmpdir_base",
    "OMPI_MCA_btl_vader_backing_directory",
    "PRTE_MCA_prte_tmpdir_base",
    "OMPI_MCA_btl_sm_backing_directory",
)
"""Variables that tell Open MPI 4 and 5 that directory (`own_place`)."""
KILL_AFTER = 5.0
"""Seconds between SIGTERM and SIGKILL for a command whose client is gone."""


def main(argv: List[str]) -> int:
    key = os.environ.get(KEY)
    if len(argv) != 2 or not argv[1].isdigit() or not key:
        print(f"usage: remote-shell ADDRESS PORT, with {KEY} in the environment", file=sys.stderr)
        return 64
    try:
        shell = Shell(argv[0], int(argv[1]), key)
    except OSError as exc:
        print(
            f"stoker remote-shell: cannot listen on {argv[0]} port {argv[1]}: {exc.strerror}", file=sys.stderr
        )
        return 71
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: shell.close())
    print("ready to run what the launcher sends", flush=True)
    place = own_place(os.environ.get("STOKER_TASK_DIR") or os.getcwd())
    shell.environ.update(dict.fromkeys(PLACES, place))
    try:
        shell.serve()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return 0


def own_place(task: str) -> str:
    """A directory of this task for the files that MPI's daemons and ranks share. They name them by process id and host, which
    are the same in several tasks of one machine with PID namespaces. A task always has the same directory, so that leftovers
    of a killed process are removed by the next one."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else tempfile.gettempdir()
    place = os.path.join(shared, f"stoker-mpi-{hashlib.sha256(task.encode()).hexdigest()[:16]}")
    shutil.rmtree(place, ignore_errors=True)
    try:
        os.mkdir(place, 0o700)
    except OSError:
        # Another user's, or the file system is full.
        return tempfile.mkdtemp(prefix="stoker-mpi-")
    return place


class Shell:
    """Listens from its construction. `serve` returns after `close`, when the last command has ended."""

    def __init__(self, address: str, port: int, key: str) -> None:
        self._key = key
        self._socket = _listen(address, port)
        self._threads: List[threading.Thread] = []
        self._closing = False
        self.environ = {name: value for name, value in os.environ.items() if name != KEY}

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def serve(self) -> None:
        self._socket.settimeout(0.2)
        while not self._closing:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                # No connection within the time: check whether to go on.
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            thread.start()
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        self._socket.close()
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        self._closing = True

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                command = self._authenticate(connection)
                wire.notice_silence(connection)
                _Command(command, self.environ, connection).run()
            except (wire.Refused, OSError) as exc:
                # Not a client of this world, or it has disconnected: nothing was started for it.
                print(f"stoker remote-shell: {exc}", file=sys.stderr, flush=True)

    def _authenticate(self, connection: socket.socket) -> str:
        connection.settimeout(wire.PATIENCE)
        first = wire.nonce()
        wire.send(connection, {"nonce": first})
        request = wire.receive(connection)
        second, command = str(request.get("nonce", "")), str(request.get("command", ""))
        if not same_world(self._key, request, first):
            raise wire.Refused("a caller without the key of this world was refused")
        wire.send(connection, {"mac": wire.proof(self._key, "shell", first, second, command)})
        connection.settimeout(None)
        return command


def same_world(key: str, request: Dict[str, Any], first: str) -> bool:
    second, command = str(request.get("nonce", "")), str(request.get("command", ""))
    return len(second) >= 32 and wire.same(
        wire.proof(key, "agent", first, second, command), request.get("mac")
    )


class _Command:
    """One command and its connection."""

    def __init__(self, command: str, environ: Dict[str, str], connection: socket.socket) -> None:
        self._connection = connection
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self) -> None:
        try:
            code = self._relay()
            if code is not None:
                self._connection.sendall(wire.frame(b"x", json.dumps({"code": code}).encode()))
        except OSError:
            # The client is gone, as below.
            pass
        finally:
            self._end()

    def _relay(self) -> Optional[int]:
        """Forward the output until the command has ended; its exit code. None: the client is gone."""
        process = self._process
        assert process.stdout is not None and process.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, b"o")
            selector.register(process.stderr, selectors.EVENT_READ, b"e")
            selector.register(self._connection, selectors.EVENT_READ, None)
            while len(selector.get_map()) > 1:
                for key, _ in selector.select():
                    data = os.read(key.fd, 1 << 16)
                    if key.data is None:
                        if not data:
                            return None
                    elif data:
                        self._connection.sendall(wire.frame(key.data, data))
                    else:
                        selector.unregister(key.fileobj)
        code = process.wait()
        return code if code >= 0 else 128 - code

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            except PermissionError:
                # On some systems: only zombies are left of the group.
                break
            try:
                self._process.wait(KILL_AFTER)
            except subprocess.TimeoutExpired:
                continue
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._process.wait()


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listening.bind((address, port))
        except OSError as exc:
            if exc.errno != errno.EADDRNOTAVAIL:
                raise
            # The address by which other tasks reach this one is not that of an interface here.
            listening.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
        listening.listen(64)
    except OSError:
        listening.close()
        raise
    return listening
