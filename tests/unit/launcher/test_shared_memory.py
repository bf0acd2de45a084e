"""Which run owns a file in memory where no control group counts it; measured on the test process itself."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.launcher.telemetry import shared_memory
from stoker.launcher.telemetry.cgroup_usage import shares_in
from stoker.launcher.telemetry.shared_memory import SharedMemory

SIZE = 8 << 20
ME = [os.getpid()]


@pytest.fixture
def place() -> Iterator[Path]:
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        pytest.skip("there is no /dev/shm")
    with tempfile.TemporaryDirectory(dir=memory, prefix="stoker-test-") as directory:
        yield Path(directory)


def data_set(place: Path) -> Path:
    """A file from before the start of the body."""
    path = place / "data.bin"
    path.write_bytes(os.urandom(SIZE))
    os.utime(path, (1e9, 1e9))
    return path


def looked(shared: SharedMemory) -> int:
    ME[0] = os.getpid()
    shared.look(ME)
    return shared.total


def test_a_file_that_a_body_writes_counts_until_it_is_removed(place: Path) -> None:
    shared = SharedMemory()
    before = looked(shared)
    path = place / "batch"
    with path.open("wb") as file:
        file.write(bytes(SIZE))
        file.flush()
        assert looked(shared) == before + SIZE
    assert looked(shared) == before + SIZE
    path.unlink()
    assert looked(shared) == before


def test_a_written_file_still_counts_when_it_is_only_read(place: Path) -> None:
    shared = SharedMemory()
    before = looked(shared)
    path = place / "batch"
    with path.open("wb") as file:
        file.write(bytes(SIZE))
        file.flush()
        looked(shared)
    with path.open("rb"):
        path.unlink()
        assert looked(shared) == before + SIZE


@pytest.mark.parametrize("mode", ["rb", "r+b"])
def test_a_data_set_that_others_put_there_is_not_the_bodys(mode: str, place: Path) -> None:
    path = data_set(place)
    shared = SharedMemory()
    before = looked(shared)
    with path.open(mode) as file:
        file.read(10)
        assert looked(shared) == before


def test_only_the_growth_of_an_existing_file_counts(place: Path) -> None:
    path = data_set(place)
    shared = SharedMemory()
    before = looked(shared)
    with path.open("ab") as file:
        looked(shared)
        file.write(bytes(SIZE))
        file.flush()
        assert looked(shared) == before + SIZE


def test_a_file_written_by_another_process_does_not_count(place: Path) -> None:
    shared = SharedMemory()
    before = looked(shared)
    path = place / "theirs"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(fd, bytes(SIZE))
    os.close(fd)
    with path.open("rb"):
        assert looked(shared) == before


def test_a_mapped_data_set_is_subtracted_from_the_resident_memory(place: Path) -> None:
    path = data_set(place)
    shared = SharedMemory()
    looked(shared)
    before = shared.unmapped(ME, 2 * SIZE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) >= 0
        looked(shared)
        assert -SIZE * 1.1 < shared.unmapped(ME, 2 * SIZE) - before < -SIZE * 0.9


def test_only_requested_files_of_a_process_are_counted() -> None:
    smaps = (
        "7f00-7f10 r--s 00000000 00:1a 77 /dev/shm/data.bin\nSize: 64 kB\nPss:  40 kB\nPss_Dirty: 40 kB\n"
        "7f10-7f20 rw-p 00000000 00:00 0 \nSize: 64 kB\nPss:  8 kB\n"
        "7f20-7f30 rw-s 00000000 00:1a 78 /dev/shm/batch\nSize: 64 kB\nPss:  20 kB\nVmFlags: rd wr\n"
    )
    key = (os.makedev(0, 0x1A), 77)
    assert shared_memory._shares(smaps, {key}) == 40 << 10
    assert shared_memory._shares(smaps, {key, (os.makedev(0, 0x1A), 78)}) == 60 << 10
    assert shared_memory._shares("", {key}) == 0


def test_pages_of_files_on_a_disk_are_the_kernels_to_give_up() -> None:
    """Mapped files on a disk do not count, because the kernel can drop their pages."""
    rollup = "Rss: 900 kB\nPss: 500 kB\nPss_Anon: 60 kB\nPss_File: 400 kB\nPss_Shmem: 40 kB\nSwapPss: 0 kB\n"
    assert shares_in(rollup) == (100 << 10, 40 << 10)
    assert shares_in("Rss: 900 kB\nPss: 500 kB\n") == (500 << 10, 500 << 10)
    assert shares_in("") is None
