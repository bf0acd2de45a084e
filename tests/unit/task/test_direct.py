"""Large files past the page cache: the same bytes for all sizes, file systems and states of the cache."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.linux import direct_io

SIZES = (
    0,
    1,
    4095,
    4096,
    4097,
    direct_io.PIECE - 1,
    direct_io.PIECE,
    direct_io.PIECE + 1,
    2 * direct_io.PIECE + 5000,
)


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "LARGE", 1)


@pytest.fixture(params=["direct", "as usual", "agreed to and then refused"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "as usual":
        monkeypatch.setattr(direct_io, "_switch", lambda fd, on: False)
    if request.param == "agreed to and then refused":
        switched: dict[int, bool] = {}
        write, read = os.write, os.preadv

        def refuse(fd: int) -> None:
            if switched.get(fd):
                raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(direct_io, "_switch", lambda fd, on: switched.update({fd: on}) or True)
        monkeypatch.setattr(os, "write", lambda fd, data: refuse(fd) or write(fd, data))
        monkeypatch.setattr(os, "preadv", lambda fd, *rest: refuse(fd) or read(fd, *rest))
    yield request.param


def written(path: Path, data: bytes, chance: random.Random) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    writer = direct_io.Writer(fd, len(data))
    at = 0
    while at < len(data):
        count = chance.choice([1, 63, 4096, 100_000, direct_io.PIECE, 2 * direct_io.PIECE])
        assert writer.write(data[at : at + count]) == len(data[at : at + count])
        at += count
    writer.finish()
    os.close(fd)


def forget(path: Path) -> None:
    """Drop a file from the cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.parametrize("size", SIZES)
def test_written_bytes_are_in_the_file(tmp_path: Path, way: str, size: int) -> None:
    chance = random.Random(size)
    data = chance.randbytes(size)
    written(tmp_path / "file", data, chance)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_all_bytes_are_read(tmp_path: Path, way: str, size: int, cached: bool) -> None:
    path = tmp_path / "file"
    data = random.Random(size).randbytes(size)
    path.write_bytes(data)
    if not cached:
        forget(path)
    fd = os.open(path, os.O_RDONLY)
    assert b"".join(bytes(piece) for piece in direct_io.pieces(fd, size)) == data
    assert not direct_io._DIRECT & fcntl_flags(fd)
    os.close(fd)


def fcntl_flags(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL)


def test_a_file_that_grew_and_one_that_shrank(tmp_path: Path, way: str) -> None:
    path = tmp_path / "file"
    data = random.Random(1).randbytes(direct_io.PIECE + 10)
    path.write_bytes(data)
    for believed in (10, 10 * direct_io.PIECE):
        forget(path)
        fd = os.open(path, os.O_RDONLY)
        assert b"".join(bytes(piece) for piece in direct_io.pieces(fd, believed)) == data
        os.close(fd)


def test_a_copy_is_not_made_twice_in_memory(tmp_path: Path, way: str) -> None:
    data = random.Random(2).randbytes(3 * direct_io.PIECE + 4096 + 7)
    (tmp_path / "source").write_bytes(data)
    forget(tmp_path / "source")
    source = os.open(tmp_path / "source", os.O_RDONLY)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT, 0o600)
    writer = direct_io.Writer(target, len(data))
    for piece in direct_io.pieces(source, len(data)):
        writer.write_piece(piece)
    writer.finish()
    os.close(source)
    os.close(target)
    assert (tmp_path / "target").read_bytes() == data


@pytest.mark.parametrize("cached", [True, False])
def test_random_positions_in_a_file(tmp_path: Path, way: str, cached: bool) -> None:
    path = tmp_path / "file"
    data = random.Random(3).randbytes(5 * direct_io._WINDOW + 123)
    path.write_bytes(data)
    if not cached:
        forget(path)
    fd = os.open(path, os.O_RDONLY)
    chance = random.Random(4)
    with direct_io.open_file(fd, len(data)) as file:
        assert stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        for _ in range(300):
            at, count = chance.randrange(len(data) + 100), chance.choice([1, 100, 5000, 3 << 20])
            file.seek(at)
            assert file.read(count) == data[at : at + count]
            assert file.tell() == at + len(data[at : at + count])
        file.seek(-10, os.SEEK_END)
        assert file.read() == data[-10:]
        with pytest.raises(OSError):
            file.seek(-1)
    with pytest.raises(OSError):
        os.fstat(fd)


def test_the_cache_is_left_alone(tmp_path: Path) -> None:
    """The purpose of direct I/O, where the file system of the tests supports it."""
    path = tmp_path / "file"
    data = random.Random(5).randbytes(4 * direct_io.PIECE)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if not direct_io._switch(fd, True):
        pytest.skip("this file system has no way past the cache")
    direct_io._switch(fd, False)
    writer = direct_io.Writer(fd, len(data))
    writer.write(data)
    writer.finish()
    assert b"".join(bytes(piece) for piece in direct_io.pieces(fd, len(data))) == data
    with direct_io.open_file(os.dup(fd), len(data)) as file:
        assert file.read() == data
    # At an offset that was not queried before: a query makes the kernel read ahead a little.
    assert not direct_io._is_cached(fd, 3 * direct_io.PIECE - direct_io._WINDOW)
    os.close(fd)
