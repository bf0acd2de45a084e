"""The server's cost of a thousand couriers, and the speed of one: `python -m bench.couriers`.

    --couriers N --seconds S    how many, and for how long each part is measured (0 couriers: not at all)
    --mib N                     the size of a checkpoint that is restored and taken in, near and far (0: not at all)

The server's side is the real one: a mirror, a ferry and a TLS connection for each courier. The other ends
are one process that answers like couriers, because a thousand real ones need 20 GB. Each has a new status
every five seconds, like a launcher's samples; in the second part also ten lines of log a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import shutil
import ssl
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from stoker.blobs import BlobStore
from stoker.engine.kubernetes.courier_client import (
    Courier,
    Mirror,
    Poller,
    PollInterval,
    RemoteTaskDir,
    direct,
)
from stoker.engine.kubernetes.manifests import credentials
from stoker.spec.tree import Tree, TreeFile
from stoker.task import courier_protocol, layout
from stoker.task.formats import StagedCheckpoint
from stoker.task.local_directory import LocalTaskDir
from stoker.testing.couriers import CourierProcess, remote_directory
from stoker.transfer import carry_checkpoint, restore_checkpoint

STATUS_EVERY = 5.0
LINES = 10.0
LINE = b"o 1700000000000 step 1234 loss 0.1234 throughput 12345 samples/s\n"


class Others:
    """Answers for all couriers. The content of a file is a function of the time, so no state is kept."""

    def __init__(self, key: bytes, lines: float) -> None:
        self._key = key
        self._lines = lines
        self._guard = courier_protocol.Guard(most=1 << 30)
        self._began = time.monotonic()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        phase = random.uniform(0, STATUS_EVERY)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:])
                }
                body = await reader.readexactly(int(fields["content-length"]))
                claim = courier_protocol.check_request(
                    self._key, "POST", courier_protocol.SYNC, fields["stoker-session"]
                )
                courier_protocol.check_body(claim, body)
                status, answer = await self._answer(claim, body, phase)
                session = courier_protocol.sign_answer(self._key, claim.nonce, status, [answer])
                lines = f"HTTP/1.1 {status} OK\r\n{courier_protocol.SESSION}: {session}\r\nContent-Length: {len(answer)}\r\n\r\n"
                writer.write(lines.encode() + answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, claim: courier_protocol.Claim, body: bytes, phase: float) -> tuple[int, bytes]:
        try:
            self._guard.admit(claim)
        except courier_protocol.WrongBoot:
            return 409, courier_protocol.pack({"boot": self._guard.boot})
        asked, _ = courier_protocol.unpack(body)
        end = time.monotonic() + asked["wait"]
        while True:
            header, data = self._news(asked, phase)
            now = time.monotonic()
            if data or now >= end:
                return 200, courier_protocol.pack(header, data)
            pause = STATUS_EVERY - (now - self._began + phase) % STATUS_EVERY + 0.001
            if self._lines:
                pause = min(pause, 1 / self._lines)
            await asyncio.sleep(min(pause, end - now))

    def _news(self, asked: dict[str, Any], phase: float) -> tuple[dict[str, Any], bytes]:
        passed = time.monotonic() - self._began
        status = json.dumps(
            {"phase": "running", "seq": int((passed + phase) / STATUS_EVERY), "usage": {"cpu": 1.0}}
        )
        records, deltas, data = [], [], b""
        held = asked["have"].get(layout.segment(0), [0])[0]
        size = int(passed * self._lines) * len(LINE)
        if size > held:
            data += LINE * ((size - held) // len(LINE))
            deltas.append([layout.segment(0), held, len(data)])
        if asked["records"].get(layout.STATUS) != courier_protocol.tag(status.encode()):
            records.append([layout.STATUS, courier_protocol.tag(status.encode()), len(status)])
            data += status.encode()
        return {"deltas": deltas, "records": records, "resets": [], "gone": [], "mark": None}, data


def others(pipe: Connection, home: str, key: bytes, lines: float) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{home}/crt", f"{home}/key")

    async def work() -> None:
        server = await asyncio.start_server(
            Others(key, lines).serve, "127.0.0.1", 0, ssl=context, backlog=4096, ssl_handshake_timeout=120
        )
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    uvloop.run(work())


async def measure(
    count: int, seconds: float, port: int, made: credentials.Keys, home: Path
) -> dict[str, float]:
    loop, pace, changes = asyncio.get_running_loop(), PollInterval(), [0]

    def changed(key: object) -> None:
        changes[0] += 1

    before = _memory()
    lines = [direct("127.0.0.1", port, made.cert.decode()) for _ in range(count)]
    ferries = []
    for number, line in enumerate(lines):
        mirror = Mirror(home / "mirror" / str(number), source="pod", boot_id="boot")
        directory = RemoteTaskDir(Courier(made.courier, line), mirror, loop)
        ferries.append(Poller(directory, ("run", number, "worker-0"), changed, pace=pace))
    tasks = []
    for ferry in ferries:
        tasks.append(asyncio.create_task(ferry.run()))
        if len(tasks) % 50 == 0:
            await asyncio.sleep(0.1)
    while not all(ferry.last_contact is not None for ferry in ferries):  # noqa: ASYNC110 - a measurement
        await asyncio.sleep(0.1)
    await asyncio.sleep(STATUS_EVERY)
    changes[0] = 0
    began, cpu, late = time.monotonic(), time.process_time(), [0.0]
    while time.monotonic() - began < seconds:
        at = loop.time()
        await asyncio.sleep(0.01)
        late.append(loop.time() - at - 0.01)
    passed = time.monotonic() - began
    found = {
        "couriers": float(count),
        "answers_per_second": changes[0] / passed,
        "cores": (time.process_time() - cpu) / passed,
        "memory_per_courier_kb": (_memory() - before) / count / 1024,
        "loop_late_p99_ms": sorted(late)[int(len(late) * 0.99)] * 1000,
        "in_trouble": float(sum(bool(ferry.trouble) for ferry in ferries)),
    }
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for line in lines:
        await line.close()
    return found


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ours(pipe: Connection, count: int, seconds: float, port: int, made: credentials.Keys, home: str) -> None:
    """In a process of its own, to measure its memory."""
    pipe.send(uvloop.run(measure(count, seconds, port, made, Path(home))))


def part(count: int, seconds: float, made: credentials.Keys, lines: float) -> dict[str, float]:
    home = tempfile.mkdtemp(prefix="couriers-")
    Path(home, "crt").write_bytes(made.cert)
    Path(home, "key").write_bytes(made.private)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    answering = spawn.Process(target=others, args=(there, home, made.courier, lines), daemon=True)
    answering.start()
    try:
        asking = spawn.Process(
            target=ours, args=(there, count, seconds, here.recv(), made, home), daemon=True
        )
        asking.start()
        found: dict[str, float] = here.recv()
        asking.join()
        return found
    finally:
        answering.terminate()
        answering.join()
        shutil.rmtree(home)


def transfers(size: int) -> dict[str, float]:
    """The MB/s of a checkpoint of one file, to and from a local directory and one behind a real courier
    on loopback. All four transfers are verified."""
    home = Path(tempfile.mkdtemp(prefix="couriers-"))
    found: dict[str, float] = {"mib": size >> 20}
    try:
        root = home / "task"
        for name in layout.DIRECTORIES:
            (root / name).mkdir(parents=True)
        blobs = BlobStore(home / "blobs")
        block = os.urandom(1 << 20)
        digest, _ = blobs.put_stream(block for _ in range(size >> 20))
        tree = blobs.put_tree(Tree.of([TreeFile("model.pt", digest, size)]))
        courier = CourierProcess(root, home / "keys")
        try:
            with remote_directory(courier, home / "mirror" / "worker-0") as far:
                for name, directory in (("near", LocalTaskDir(str(root))), ("far", far)):
                    used, ours_used = courier.cpu(), time.process_time()
                    begin = time.monotonic()
                    restore_checkpoint(blobs, tree, directory, 1)
                    found[f"{name}_restore"] = size / 1e6 / (time.monotonic() - begin)
                    (root / layout.staged(1)).mkdir()
                    os.rename(root / layout.checkpoints(1) / "model.pt", root / layout.staged(1) / "model.pt")
                    file = {"path": "model.pt", "size": size, "sha256": digest}
                    staged = StagedCheckpoint(1, 1, "model.pt", "sdk", files=[file])
                    begin = time.monotonic()
                    carry_checkpoint(directory, staged, BlobStore(home / f"carried {name}"))
                    found[f"{name}_carry"] = size / 1e6 / (time.monotonic() - begin)
                    shutil.rmtree(home / f"carried {name}")
                found["courier_cpu_seconds"] = courier.cpu() - used
                found["server_cpu_seconds"] = time.process_time() - ours_used
                found["courier_memory_mib"] = courier.memory() >> 20
        finally:
            courier.kill()
    finally:
        shutil.rmtree(home)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--couriers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    if given.mib:
        print(json.dumps({"what": "transfers", **_rounded(transfers(given.mib << 20))}), flush=True)
    made = credentials.make()
    for what, lines in (
        ("quiet: a status every 5 s", 0.0),
        ("busy: 10 lines of log a second as well", LINES),
    ):
        if given.couriers:
            found = part(given.couriers, given.seconds, made, lines)
            print(json.dumps({"what": what, **_rounded(found)}), flush=True)


def _rounded(found: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in found.items()}


if __name__ == "__main__":
    main()
