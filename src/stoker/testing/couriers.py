"""Real couriers for tests and measurements: separate processes, over real TLS on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO

from stoker.engine.kubernetes.courier_client import Courier, Mirror, RemoteTaskDir, StreamTransport, direct
from stoker.engine.kubernetes.manifests import credentials as attempt_keys

BOOT = "the machine's boot"


class CourierProcess:
    """A courier on a task directory. It can be killed and started again on the same port, as the kubelet does."""

    def __init__(
        self, directory: Path, keys: Path, *, program: Sequence[str] = (), shared: Path | None = None
    ) -> None:
        """`program`: its command, if not a module of this Python. `shared`: a volume for checkpoints."""
        self.directory = directory
        self._shared = shared
        made = attempt_keys.make()
        self.key = made.courier
        self.certificate = made.cert.decode()
        keys.mkdir(mode=0o700, parents=True)
        (keys / "courier.key").write_bytes(made.courier)
        (keys / "tls.crt").write_bytes(made.cert)
        (keys / "tls.key").write_bytes(made.private)
        self._keys = keys
        self._program = list(program) or [sys.executable, "-m", "stoker.courier"]
        self.port = 0
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        arguments = ["--directory", str(self.directory), "--key-dir", str(self._keys)]
        arguments += ["--port", str(self.port), "--host", "127.0.0.1"]
        arguments += ["--shared", str(self._shared)] if self._shared is not None else []
        self.process = subprocess.Popen([*self._program, *arguments], stdout=subprocess.PIPE, text=True)
        line = _stdout(self.process).readline()
        if not line.startswith("courier listens on port "):
            self.process.wait()
            raise AssertionError(f"the courier did not start: {line!r}")
        self.port = int(line.split()[-1])

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def transport(self) -> StreamTransport:
        return direct("127.0.0.1", self.port, self.certificate)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait()
            _stdout(self.process).close()
            self.process = None

    def memory(self) -> int:
        """The most bytes it ever had in memory (VmHWM)."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) << 10

    def cpu(self) -> float:
        """Seconds of processor time used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class LoopThread:
    """An event loop in its own thread, as the server's loop is to its worker threads."""

    def __init__(self, factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop) -> None:
        self.loop = factory()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: object, timeout: float = 60.0) -> object:
        assert asyncio.iscoroutine(coroutine)
        future: Future[object] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        return future.result(timeout)

    def close(self) -> None:
        async def finish() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.run(finish())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@contextlib.contextmanager
def remote_directory(
    courier: CourierProcess,
    mirror: Path,
    *,
    patience: float = 30.0,
    source: str = "a pod",
    shares: bool = False,
) -> Iterator[RemoteTaskDir]:
    """A remote task directory over this courier, with its own event loop."""
    thread = LoopThread()
    transport = courier.transport()
    try:
        client = Courier(courier.key, transport)
        kept = Mirror(mirror, source=source, boot_id=BOOT)
        yield RemoteTaskDir(client, kept, thread.loop, patience=patience, shares=shares)
    finally:
        thread.run(transport.close())
        thread.close()


def _stdout(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout
