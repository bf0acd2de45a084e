"""A proxy before a PostgreSQL server that cuts connections in the middle of a commit."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from pathlib import Path
from typing import Self


class Cutter:
    """`before` cuts before the server receives the commit, `after` before the client receives the
    confirmation. Each cut happens once; then everything passes until the next `cut`."""

    def __init__(self, server: Path) -> None:
        self._server = str(server / ".s.PGSQL.5432")
        self.root = Path(tempfile.mkdtemp(prefix="stoker-cut-"))
        self._listening = socket.socket(socket.AF_UNIX)
        self._mode: str | None = None
        self._threads: list[threading.Thread] = []
        self._pairs: list[_Pair] = []
        self.cuts = 0

    def cut(self, mode: str) -> None:
        self._mode = mode

    def __enter__(self) -> Self:
        self._listening.bind(str(self.root / ".s.PGSQL.5432"))
        self._listening.listen()
        self._threads.append(threading.Thread(target=self._accept, daemon=True))
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for pair in self._pairs:
            pair.end()
        for thread in self._threads:
            thread.join(60)
        shutil.rmtree(self.root)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                pair = _Pair(self, client, server)
                self._pairs.append(pair)
                self._threads.append(threading.Thread(target=pair.run, daemon=True))
                self._threads[-1].start()

    def _take(self, mode: str) -> bool:
        if self._mode != mode:
            return False
        self._mode = None
        self.cuts += 1
        return True


class _Pair:
    def __init__(self, cutter: Cutter, client: socket.socket, server: socket.socket) -> None:
        self._cutter, self._client, self._server = cutter, client, server
        self._deaf = False

    def run(self) -> None:
        back = threading.Thread(target=self._to_client, daemon=True)
        back.start()
        self._to_server()
        back.join()
        self._client.close()
        self._server.close()

    def _to_server(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._client.recv(65536):
                if b"COMMIT\0" in data:
                    if self._cutter._take("before"):
                        break
                    self._deaf = self._cutter._take("after")
                self._server.sendall(data)
        self.end()

    def _to_client(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._server.recv(65536):
                if self._deaf:
                    break
                self._client.sendall(data)
        self.end()

    def end(self) -> None:
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
