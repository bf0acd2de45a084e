"""A real courier that is killed, cut off, restarted, and run as in a pod."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from stoker.blobs import BlobStore
from stoker.engine.kubernetes.courier_client import (
    Courier,
    CourierLost,
    Mirror,
    Poller,
    RemoteTaskDir,
    direct,
)
from stoker.engine.kubernetes.manifests.credentials import make
from stoker.launcher import bundle
from stoker.launcher.journal import Journal
from stoker.task import courier_protocol, formats, layout
from stoker.testing.couriers import BOOT, CourierProcess, LoopThread, remote_directory
from stoker.testing.taskdir_suite import contents, tree_of
from stoker.transfer import bring_code, carry_checkpoint, carry_outputs, restore_checkpoint
from stoker.transfer.fetch import RANGE
from support.waiting import wait

SEED = int(os.environ.get("STOKER_SEED", "0")) or 7
WAIT = 60.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "task"
    root.mkdir()
    for name in layout.DIRECTORIES:
        (root / name).mkdir()
    return root


@pytest.fixture
def courier(root: Path, tmp_path: Path) -> Iterator[CourierProcess]:
    made = CourierProcess(root, tmp_path / "keys")
    try:
        yield made
    finally:
        made.kill()


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def stage(root: Path, files: dict[str, bytes]) -> formats.StagedCheckpoint:
    listed = []
    for path, data in files.items():
        target = root / layout.staged(1) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        listed.append({"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    return formats.StagedCheckpoint(number=1, generation=1, name="a", how="sdk", files=listed)


class Killer:
    """Kills a courier at random, as the kernel does when memory runs out, and starts it again."""

    def __init__(self, courier: CourierProcess, seed: int, most: int) -> None:
        self._courier = courier
        self._chance = random.Random(seed)
        self._over = threading.Event()
        self.kills = 0
        self._most = most
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        while self.kills < self._most and not self._over.wait(self._chance.uniform(0.0, 0.25)):
            self._courier.kill()
            self.kills += 1
            self._courier.start()

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.parametrize("seed", range(SEED, SEED + 2))
def test_journeys_with_a_courier_that_is_killed(
    courier: CourierProcess, root: Path, blobs: BlobStore, tmp_path: Path, seed: int
) -> None:
    files = {"big": random.Random(seed).randbytes(24 << 20), "d/small": b"s", "d/empty": b""}
    files |= {f"many/{number}": b"%d" % number for number in range(300)}
    with remote_directory(courier, tmp_path / "mirror" / "t") as far, Killer(courier, seed, 5) as killer:
        restore_checkpoint(blobs, tree_of(blobs, files), far, 1)
        assert contents(root / layout.checkpoints(1)) == files
        elsewhere = BlobStore(tmp_path / "elsewhere")
        digest, _ = carry_checkpoint(far, stage(root, files), elsewhere)
        assert elsewhere.verify_tree(digest) == []
        for path, data in files.items():
            (root / layout.OUTPUT / path).parent.mkdir(parents=True, exist_ok=True)
            (root / layout.OUTPUT / path).write_bytes(data)
        assert carry_outputs(far, blobs)[1:] == (len(files), sum(map(len, files.values())))
        far.write_order(formats.Order(seq=1, generation=1, verb="run"))
        assert far.catch_up(WAIT)
    assert killer.kills > 0, f"seed {seed}"
    assert not list((root / ".courier/stage").iterdir())


class Cutter:
    """A proxy between server and courier that cuts every connection after so many bytes."""

    def __init__(self, port: int, after: Callable[[], int]) -> None:
        self._port = port
        self._after = after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.cuts = 0
        self.carried = 0
        self._over = False
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._over:
            near, _ = self._listener.accept()
            if self._over:
                near.close()
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [near, far]
            budget = [self._after()]
            for source, target in ((near, far), (far, near)):
                thread = threading.Thread(target=self._carry, args=(source, target, budget))
                thread.start()
                self._threads.append(thread)

    def _carry(self, source: socket.socket, target: socket.socket, budget: list[int]) -> None:
        try:
            while data := source.recv(65536):
                part = data[: max(0, budget[0])]
                budget[0] -= len(data)
                target.sendall(part)
                self.carried += len(part)
                if budget[0] <= 0:
                    self.cuts += 1
                    break
        except OSError:
            pass
        finally:
            for sock in (source, target):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._over = True
        socket.create_connection(("127.0.0.1", self.port)).close()
        for thread in self._threads:
            thread.join()
        for sock in (self._listener, *self._sockets):
            sock.close()


@contextmanager
def cut_off(
    courier: CourierProcess, mirror: Path, after: Callable[[], int], patience: float = 30.0
) -> Iterator[tuple[RemoteTaskDir, Cutter]]:
    cutter = Cutter(courier.port, after)
    thread = LoopThread()
    line = direct("127.0.0.1", cutter.port, courier.certificate)
    try:
        made = Mirror(mirror, source="a pod", boot_id=BOOT)
        yield RemoteTaskDir(Courier(courier.key, line), made, thread.loop, patience=patience), cutter
    finally:
        thread.run(line.close())
        thread.close()
        cutter.close()


def test_what_was_cut_short_goes_on_where_it_was(
    courier: CourierProcess, root: Path, blobs: BlobStore, tmp_path: Path
) -> None:
    """A connection lasts for about two ranges, so no whole file fits one connection."""
    chance = random.Random(SEED)
    data = chance.randbytes(60 << 20)
    digest = tree_of(blobs, {"big": data})
    with cut_off(courier, tmp_path / "m" / "t", lambda: chance.randrange(RANGE, 4 * RANGE)) as (far, cutter):
        restore_checkpoint(blobs, digest, far, 1)
        assert (root / layout.checkpoints(1) / "big").read_bytes() == data
        assert cutter.cuts >= 4
        there = cutter.carried
        assert there < 4 * len(data), "transferred bytes are not sent again"
        elsewhere = BlobStore(tmp_path / "elsewhere")
        carry_checkpoint(far, stage(root, {"big": data}), elsewhere)
        assert elsewhere.verify(hashlib.sha256(data).hexdigest())
        assert cutter.carried - there < 4 * len(data)


def test_another_server_goes_on_in_the_middle_of_a_file(
    courier: CourierProcess, root: Path, tmp_path: Path
) -> None:
    data = random.Random(SEED).randbytes(40 << 20)
    staged = stage(root, {"big": data})
    mirror, elsewhere = tmp_path / "m" / "t", BlobStore(tmp_path / "elsewhere")
    budgets = [20 << 20]  # the first connection lasts for half of the file, later ones for nothing
    with (
        cut_off(courier, mirror, lambda: budgets.pop() if budgets else 0, patience=5) as (far, _),
        pytest.raises(CourierLost),
    ):
        carry_checkpoint(far, staged, elsewhere)
    parts = list((mirror / ".fetch").iterdir())
    assert parts and parts[0].stat().st_size >= RANGE
    with cut_off(courier, mirror, lambda: 1 << 40) as (far, cutter):
        carry_checkpoint(far, staged, elsewhere)
        assert cutter.carried < len(data) - RANGE // 2
    assert elsewhere.verify(hashlib.sha256(data).hexdigest())
    assert list((mirror / ".fetch").iterdir()) == []


def test_an_interrupted_transfer_resumes(courier: CourierProcess, root: Path, tmp_path: Path) -> None:
    data = random.Random(SEED).randbytes(8 * RANGE)
    staged = stage(root, {"big": data})
    mirror, elsewhere = tmp_path / "m" / "t", BlobStore(tmp_path / "elsewhere")
    left = iter(range(3))
    with remote_directory(courier, mirror) as far:
        with pytest.raises(StopIteration):
            carry_checkpoint(far, staged, elsewhere, pause=lambda: print(next(left)))
        assert [part.stat().st_size for part in (mirror / ".fetch").iterdir()] == [4 * RANGE]
        carry_checkpoint(far, staged, elsewhere)
    assert elsewhere.verify(hashlib.sha256(data).hexdigest())


def test_a_hash_alone_does_not_give_access_to_content(
    courier: CourierProcess, root: Path, blobs: BlobStore, tmp_path: Path
) -> None:
    blobs.put_stream([b"another run's weights"])
    staged = stage(root, {"a": b"another run's weights"})
    shutil.rmtree(root / layout.staged(1))
    with remote_directory(courier, tmp_path / "m" / "t") as far, pytest.raises(Exception, match="is gone"):
        carry_checkpoint(far, staged, blobs)


def test_transferred_outputs_are_not_fetched_again(
    courier: CourierProcess, root: Path, blobs: BlobStore, tmp_path: Path
) -> None:
    data = random.Random(SEED).randbytes(20 << 20)
    known = tree_of(blobs, {"model.pt": data})
    (root / layout.OUTPUT / "model.pt").write_bytes(data)
    (root / layout.OUTPUT / "new").write_bytes(b"new")
    with cut_off(courier, tmp_path / "m" / "t", lambda: 1 << 40) as (far, cutter):
        assert carry_outputs(far, blobs, known=known)[1:] == (2, len(data) + 3)
        assert cutter.carried < 1 << 20


def test_an_output_that_changes_while_it_is_carried(
    courier: CourierProcess, root: Path, blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = root / layout.OUTPUT / "growing"
    target.write_bytes(b"as it was listed")
    with remote_directory(courier, tmp_path / "m" / "t") as far:
        real = far.walk

        def walk(path: str, *, max_entries: int) -> list[dict[str, Any]]:
            found = real(path, max_entries=max_entries)
            target.write_bytes(b"as it is when it is carried")
            return found

        monkeypatch.setattr(far, "walk", walk)
        digest, _, size = carry_outputs(far, blobs)
    (file,) = blobs.tree(digest).files
    assert blobs.path(file.sha256).read_bytes() == b"as it is when it is carried" and size == 27


def test_a_courier_with_another_certificate_or_key_is_nobody(courier: CourierProcess, tmp_path: Path) -> None:
    other = make()
    for key, certificate in ((courier.key, other.cert.decode()), (other.courier, courier.certificate)):

        async def call(key: bytes = key, certificate: str = certificate) -> None:
            line = direct("127.0.0.1", courier.port, certificate)
            try:
                await Courier(key, line).call(courier_protocol.DISCARD, {"path": "x"})
            finally:
                await line.close()

        with pytest.raises(CourierLost):
            asyncio.run(call())


def test_a_ferry_brings_lines_while_they_are_written(
    courier: CourierProcess, root: Path, tmp_path: Path
) -> None:
    """Couriers are killed meanwhile: nothing is lost or duplicated."""
    with remote_directory(courier, tmp_path / "m" / "t") as far:
        changes: list[Any] = []
        ferry = Poller(far, ("run", 1, "worker-0"), changes.append)
        thread = LoopThread.__new__(LoopThread)
        thread.loop = far._calls._loop
        following = asyncio.run_coroutine_threadsafe(ferry.run(), thread.loop)
        wait(far.exists, what="the first contact")
        written = b""
        for number in range(60):
            line = b"o 1700000000000 line %d\n" % number
            with (root / layout.segment(number // 20)).open("ab") as file:
                file.write(line)
            written += line
            if number % 25 == 24:
                courier.kill()
                courier.start()
            time.sleep(0.005)
        wait(
            lambda: b"".join(far.read(layout.segment(number)) for number in range(3)) == written,
            what="every line",
        )
        (root / layout.segment(1)).unlink()
        wait(lambda: far.list(layout.LOG) == ["000000.log", "000002.log"], what="what was dropped")
        following.cancel()
        assert changes and ferry.last_contact is not None


def test_orders_are_heard_while_much_is_carried(courier: CourierProcess, root: Path, tmp_path: Path) -> None:
    (root / layout.OUTPUT / "big").write_bytes(random.Random(SEED).randbytes(64 << 20))
    with remote_directory(courier, tmp_path / "m" / "t") as far:
        carrying = threading.Thread(target=carry_outputs, args=(far, BlobStore(tmp_path / "b")))
        carrying.start()
        seq = 0
        while carrying.is_alive():
            seq += 1
            far.write_order(formats.Order(seq=seq, generation=1, verb="run"))
        carrying.join()
        assert seq > 3


@pytest.mark.long
def test_its_memory_is_small(courier: CourierProcess, root: Path, blobs: BlobStore, tmp_path: Path) -> None:
    """Limited to 96 MiB in a pod; the rest is for the page cache and for settling."""
    files = {f"d{number % 100}/f{number}": b"%d" % number for number in range(4000)}
    with remote_directory(courier, tmp_path / "m" / "t") as far:
        bring_code(blobs, tree_of(blobs, files), far)
        big = random.Random(SEED).randbytes(50 << 20)
        restore_checkpoint(blobs, tree_of(blobs, {"big": big, "again": big}), far, 1)
        for number in range(30):
            (root / layout.segment(number)).write_bytes(b"x" * 1023 + b"\n" + big[: 2 << 20])
        (root / layout.OUTPUT / "big").write_bytes(big)
        works = [
            threading.Thread(target=carry_outputs, args=(far, BlobStore(tmp_path / f"b{number}")))
            for number in range(3)
        ]
        works += [threading.Thread(target=far.catch_up, args=(WAIT,)) for _ in range(3)]
        for work in works:
            work.start()
        for work in works:
            work.join()
    assert courier.memory() < 72 << 20, f"{courier.memory() >> 20} MiB"


def test_it_stays_until_the_task_was_released(courier: CourierProcess, root: Path, tmp_path: Path) -> None:
    assert courier.process is not None
    with remote_directory(courier, tmp_path / "m" / "t") as far:
        far.write_order(formats.Order(seq=1, generation=1, verb="run"))
        courier.process.send_signal(signal.SIGTERM)
        (root / layout.OUTPUT / "late").write_bytes(b"late")
        assert carry_outputs(far, BlobStore(tmp_path / "b"))[1:] == (1, 4)
        assert courier.process.poll() is None
        far.write_order(formats.Order(seq=2, generation=1, verb="release"))
        assert courier.process.wait(WAIT) == 0


def test_it_goes_at_once_when_nothing_was_ever_ordered(courier: CourierProcess) -> None:
    assert courier.process is not None
    courier.process.send_signal(signal.SIGTERM)
    assert courier.process.wait(WAIT) == 0


def test_a_launcher_that_lives_is_not_settled(courier: CourierProcess, root: Path, tmp_path: Path) -> None:
    from stoker.launcher.task_files import take_lock

    journal = Journal(str(root))
    journal.append({"k": "starting", "seq": 1, "generation": 1})
    journal.close()
    lock = take_lock(str(root))
    assert lock is not None
    try:
        with remote_directory(courier, tmp_path / "m" / "t") as far:
            with pytest.raises(OSError, match="a launcher works"):
                far.settle(1)
            assert far.catch_up(WAIT)
            assert [entry["k"] for entry in far.journal()[0]] == ["starting"]
    finally:
        os.close(lock)


@pytest.mark.parametrize("version", ["3.9", "3.13"])
def test_it_runs_from_the_bundle_on_other_pythons(
    root: Path, blobs: BlobStore, tmp_path: Path, version: str
) -> None:
    """As in a pod: a zip, a Python without Stoker, `-I -S`."""
    python = next(_pythons(version), None)
    if python is None:
        pytest.skip(f"no Python {version} on PATH or in ~/.pyenv")
    bundle.write_zip(str(tmp_path / "bundle.zip"))
    program = [python, "-I", "-S", str(tmp_path / "bundle.zip"), "courier"]
    courier = CourierProcess(root, tmp_path / "keys", program=program)
    try:
        with remote_directory(courier, tmp_path / "m" / "t") as far:
            files = {"a.py": b"print()", "d/run.sh": b"#!/bin/sh"}
            bring_code(blobs, tree_of(blobs, files), far)
            assert contents(root / layout.CODE) == files
            journal = Journal(str(root))
            journal.append({"k": "starting", "seq": 1, "generation": 1})
            journal.close()
            far.settle(1)
            assert [entry["k"] for entry in far.journal()[0]] == ["starting", "ended"]
            assert carry_outputs(far, blobs)[1:] == (0, 0)
        assert courier.memory() < 48 << 20, f"{courier.memory() >> 20} MiB"
    finally:
        courier.kill()


def _pythons(version: str) -> Iterator[str]:
    found = [
        shutil.which(f"python{version}"),
        *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
    ]
    for path in found:
        if path and subprocess.run([path, "-c", "import ssl"], capture_output=True).returncode == 0:
            yield path
