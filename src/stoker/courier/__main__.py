"""`courier --directory DIR --port PORT --key-dir DIR`: serve a task directory until it is no longer needed.

Ends on SIGTERM once the task was released, or if it never had an order. Before that the directory may hold files that
the server has not copied yet, and the pod's grace is for copying them. After it the kubelet kills the courier.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import ssl
import sys
import threading
import time
from typing import List

from stoker.courier import server
from stoker.courier.handlers import Handlers
from stoker.linux.descriptors import Closing
from stoker.task import courier_protocol, formats, layout
from stoker.task.local_directory import LocalTaskDir
from stoker.task.safe_open import open_beneath

TOUCH = 10.0
"""Seconds between two updates of the contact file."""
_PR_SET_DUMPABLE = 4
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8


class Contact:
    """The file by which the launcher knows that a server is in contact. `touch` may be called from any thread."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._last = -TOUCH
        self._count = 0

    def touch(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._last < TOUCH:
                return
            try:
                self._write()
            except OSError:
                return  # the disk is full, or user code put something there: the next request tries again
            self._last = now

    def _write(self) -> None:
        self._count += 1
        with Closing(open_beneath(self._directory, "")) as root:
            with Closing(formats.create(f"{layout.CONTACT}.tmp", 0o600, dir_fd=root)) as fd:
                formats.write_all(fd, f"{os.getpid()} {time.time():.3f} {self._count}\n".encode())
            os.replace(f"{layout.CONTACT}.tmp", layout.CONTACT, src_dir_fd=root, dst_dir_fd=root)


def main(argv: List[str]) -> int:
    parser = argparse.ArgumentParser(prog="courier")
    parser.add_argument("--directory", required=True)
    parser.add_argument("--port", type=int, default=courier_protocol.PORT, help="0: a free one, printed")
    parser.add_argument("--key-dir", required=True, help="holds courier.key, tls.crt, tls.key")
    parser.add_argument("--shared", help="the volume for checkpoints that the tasks of one server share")
    parser.add_argument("--host", help="default: every address")
    given = parser.parse_args(argv)
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    _deny_ptrace()
    _limit_arenas()
    key = _key(os.path.join(given.key_dir, "courier.key"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(os.path.join(given.key_dir, "tls.crt"), os.path.join(given.key_dir, "tls.key"))
    handlers = Handlers(given.directory, shared=given.shared)
    handlers.recover()
    listener = server.listen(given.port, given.host)
    print(f"courier listens on port {listener.getsockname()[1]}", flush=True)
    contact = Contact(given.directory)
    local = LocalTaskDir(given.directory)
    server.CourierServer(listener, context, key, handlers, contact.touch).serve(
        lambda: ending.is_set() and released(local)
    )
    return 0


def released(local: LocalTaskDir) -> bool:
    order = local.order()
    return order is None or order.verb == "release"


def _key(path: str) -> bytes:
    with open(path, "rb") as file:
        key = file.read(courier_protocol.KEY_BYTES + 1)
    if len(key) != courier_protocol.KEY_BYTES:
        raise SystemExit(f"courier: {path} must hold {courier_protocol.KEY_BYTES} bytes")
    return key


def _deny_ptrace() -> None:
    """Deny other processes of this user access to the memory of this one, which holds the key."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (OSError, AttributeError):
        pass  # not Linux


def _limit_arenas() -> None:
    """Return big freed blocks to the system at once, and share arenas between threads."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 256 << 10)
        libc.mallopt(_M_ARENA_MAX, 2)
    except (OSError, AttributeError):
        pass  # not glibc


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
