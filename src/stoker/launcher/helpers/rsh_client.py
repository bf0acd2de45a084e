"""`mpi-agent HOST COMMAND...`: mpirun calls it instead of ssh.

HOST is the name of a task; STOKER_MPI_HOSTS has the address of that task's remote shell. The exit code is that of the command,
or 255, as with ssh, when the remote shell could not be reached.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Dict, List, NamedTuple, Tuple

from stoker.launcher.helpers import rsh_protocol as wire
from stoker.launcher.helpers.rsh_server import KEY

HOSTS = "STOKER_MPI_HOSTS"
PATIENCE = 60.0
"""Seconds to wait for a remote shell that does not listen yet: the tasks of a world do not start equally fast."""
UNREACHABLE = 255


class Host(NamedTuple):
    name: str
    address: str
    port: int
    slots: int


def read_hosts(text: str) -> List[Host]:
    """`worker-0=10.0.0.7:7000*2,worker-1=[fd00::8]:7000*2`"""
    found = []
    for entry in text.split(",") if text else []:
        name, _, rest = entry.partition("=")
        place, _, slots = rest.partition("*")
        address, _, port = place.rpartition(":")
        found.append(Host(name, address.strip("[]"), int(port), int(slots or 1)))
    return found


def main(argv: List[str]) -> int:
    name, command = parse(argv)
    hosts = {host.name: host for host in read_hosts(os.environ.get(HOSTS, ""))}
    if name not in hosts or not command:
        known = ", ".join(hosts) or "none"
        print(f"stoker mpi-agent: no task named {name!r} in this world; there are: {known}", file=sys.stderr)
        return UNREACHABLE
    try:
        return ask(hosts[name], command, os.environ.get(KEY, ""))
    except (OSError, wire.Refused) as exc:
        print(f"stoker mpi-agent: the command cannot be run on {name}: {exc}", file=sys.stderr)
        return UNREACHABLE


def parse(argv: List[str]) -> Tuple[str, str]:
    """The host and one line for its shell, from ssh's arguments: options first, the words joined by spaces."""
    words = list(argv)
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option in ("-l", "-p", "-i", "-o", "-F") and words:
            words.pop(0)
    name = words.pop(0).rpartition("@")[2] if words else ""
    return name, " ".join(words)


def ask(host: Host, command: str, key: str) -> int:
    """Run the command on that host. The end of this process closes the connection, which ends the command."""
    with _connect(host) as sock:
        sock.settimeout(wire.PATIENCE)
        first = str(wire.receive(sock).get("nonce", ""))
        second = wire.nonce()
        mac = wire.proof(key, "agent", first, second, command)
        wire.send(sock, {"nonce": second, "command": command, "mac": mac})
        answer: Dict[str, object] = wire.receive(sock)
        if not wire.same(wire.proof(key, "shell", first, second, command), answer.get("mac")):
            raise wire.Refused("the remote shell does not have the key of this world")
        sock.settimeout(None)
        wire.notice_silence(sock)
        return _follow(sock)


def _connect(host: Host) -> socket.socket:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((host.address, host.port), timeout=10.0)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _follow(sock: socket.socket) -> int:
    while True:
        found = wire.read_frame(sock)
        if found is None:
            raise wire.Refused("the connection was lost")
        kind, data = found
        if kind == b"x":
            return int(json.loads(data)["code"])
        stream = sys.stdout if kind == b"o" else sys.stderr
        stream.buffer.write(data)
        stream.flush()
