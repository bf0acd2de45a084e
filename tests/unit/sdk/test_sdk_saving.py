"""Asynchronous saves without torch: any bytes, written by the writer process."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker.launcher.verify import verify
from stoker.sdk import archive, async_save, writer_process
from stoker.sdk.async_save import Memory, Saver
from support.waiting import wait


class Bytes:
    """Bytes at given places in the memory."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts
        self.size = sum(map(len, parts))

    def fill(self, memory: Memory) -> None:
        assert memory.map is not None
        memory.map[: self.size] = b"".join(self._parts)


def request(name: str, *, size: int, **more: Any) -> dict[str, Any]:
    files = {"": [["raw", [0, size]]]}
    return {"name": name, "step": 1, "metrics": {}, "keep": None, "files": files, **more}


def keep(saver: Saver, name: str, data: bytes, **more: Any) -> None:
    saver.save(Bytes(data), request(name, size=len(data), **more))


@pytest.fixture(params=["process", "thread"])
def saver(request: pytest.FixtureRequest, there: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Saver]:
    """The saver of this process, as in scripts, with each of the two kinds of writers."""
    if request.param == "thread":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    fresh = Saver()
    monkeypatch.setattr(async_save, "_saver", fresh)
    yield fresh
    fresh.finish()


def commits(there: Path) -> list[dict[str, Any]]:
    path = there.parent.parent / "sdk" / "commits.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# -- archives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_an_archive_is_laid_out_before_it_is_written(seed: int) -> None:
    chance = random.Random(seed)
    data = chance.randbytes(200_000)
    records = []
    for number in range(chance.randrange(1, 30)):
        begin = chance.randrange(len(data))
        size = chance.choice([0, 1, 63, 64, 65, 5000])
        records.append((f"archive/data/{number}", begin, min(size, len(data) - begin)))
    before = chance.randbytes(chance.randrange(100))
    file = io.BytesIO(before)
    file.seek(len(before))
    assert archive.write(file, records, memoryview(data)) == archive.size(records)
    inner = io.BytesIO(file.getvalue()[len(before) :])
    with zipfile.ZipFile(inner) as found:
        assert found.testzip() is None
        assert {name: found.read(name) for name in found.namelist()} == {
            name: data[begin : begin + size] for name, begin, size in records
        }
        for info in found.infolist():
            head = inner.getvalue()[info.header_offset :]
            begin = info.header_offset + 30 + int.from_bytes(head[26:28], "little")
            assert (begin + int.from_bytes(head[28:30], "little")) % archive.ALIGNMENT == 0


def test_archives_and_records_beyond_four_gibibytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 64-bit fields, without the bytes: the limit of the 32-bit fields is lowered here."""
    monkeypatch.setattr(archive, "_LARGE", 1000)
    data = bytes(range(256)) * 20
    records = [("a/small", 0, 10), ("a/large", 100, 3000), ("a/far", 7, 20)]
    path = tmp_path / "wide.pt"
    with path.open("wb", buffering=0) as file:
        archive.write(file, records, memoryview(data))
    assert path.stat().st_size == archive.size(records)
    # A reader depends on the marker of 64-bit fields, which must be the real one.
    raw = path.read_bytes().replace((1000).to_bytes(4, "little"), b"\xff\xff\xff\xff")
    with zipfile.ZipFile(io.BytesIO(raw)) as found:
        assert [info.file_size for info in found.infolist()] == [10, 3000, 20]
        assert found.testzip() is None


# -- saving ------------------------------------------------------------------------------------------------------


def test_the_content_at_the_call_is_saved(saver: Saver, there: Path) -> None:
    data = bytearray(b"a" * 3_000_000)
    snapshot = Bytes(bytes(data))
    saver.save(snapshot, request("step-1.bin", size=snapshot.size, step=1, metrics={"loss": 0.5}))
    data[:] = b"b" * len(data)
    stoker.checkpoint.wait()
    assert (there / "step-1.bin").read_bytes() == b"a" * 3_000_000
    assert os.listdir(there) == ["step-1.bin"]
    assert commits(there) == [{"name": "step-1.bin", "step": 1, "generation": 2, "metrics": {"loss": 0.5}}]


def test_the_next_save_waits_and_may_be_larger(saver: Saver, there: Path) -> None:
    for number, size in enumerate([10, 5_000_000, 1, 9_000_000]):
        keep(saver, f"step-{number}", bytes([number]) * size)
    assert saver.pending == "step-3"
    saver.wait()
    assert [(there / f"step-{number}").stat().st_size for number in range(4)] == [10, 5_000_000, 1, 9_000_000]
    assert (there / "step-3").read_bytes()[::100_000] == b"\3" * 90
    assert [commit["name"] for commit in commits(there)] == [f"step-{number}" for number in range(4)]


def test_old_checkpoints_are_removed(saver: Saver, there: Path) -> None:
    for number in range(4):
        keep(saver, f"step-{number}", b"x", keep=2)
    saver.wait()
    assert sorted(os.listdir(there)) == ["step-2", "step-3"]


def test_a_save_in_progress_is_the_checkpoint_to_resume_from(
    saver: Saver, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.mkdir(parents=True)
    (there / "old").write_bytes(b"old")
    monkeypatch.setenv("STOKER_RESUME_FROM", str(there / "old"))
    assert stoker.checkpoint.load() == b"old"
    keep(saver, "step-1", b"new")
    assert stoker.checkpoint.load() == b"new"


def test_a_synchronous_save_waits_for_the_one_in_progress(saver: Saver, there: Path) -> None:
    """Otherwise the older save could replace the newer one."""
    keep(saver, "last", b"old" * 1_000_000)
    stoker.checkpoint.save("last", b"new")
    saver.wait()
    assert (there / "last").read_bytes() == b"new"


def test_an_error_is_raised_once_by_the_next_call(saver: Saver, there: Path) -> None:
    there.parent.mkdir(parents=True)
    there.write_text("in the way", encoding="utf-8")
    keep(saver, "step-1", b"lost")
    with pytest.raises(OSError, match=r"checkpoint step-1 could not be written") as caught:
        keep(saver, "step-2", b"not begun")
    assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)
    there.unlink()
    keep(saver, "step-3", b"there")
    saver.wait()
    assert os.listdir(there) == ["step-3"]


def test_a_handler_that_saves_while_the_script_does(saver: Saver, there: Path) -> None:
    """The memory is in use: the handler writes by itself, and both checkpoints are complete."""

    class Interrupted(Bytes):
        def fill(self, memory: Memory) -> None:
            assert async_save.saver().busy
            stoker.checkpoint.save("handler", b"by itself")
            super().fill(memory)

    snapshot = Interrupted(b"script")
    saver.save(snapshot, request("script", size=snapshot.size))
    assert not saver.busy
    saver.wait()
    assert (there / "handler").read_bytes() == b"by itself"
    assert (there / "script").read_bytes() == b"script"


# -- the process -------------------------------------------------------------------------------------------------

linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only a thread writes here")

PRELUDE = """
import os, signal, sys, time
from stoker.sdk import async_save
class Bytes:
    def __init__(self, data): self.data, self.size = data, len(data)
    def fill(self, memory): memory.map[: self.size] = self.data
def keep(name, data):
    request = {"name": name, "step": 1, "metrics": {}, "keep": None, "files": {"": [["raw", [0, len(data)]]]}}
    async_save.saver().save(Bytes(data), request)
def writer():
    return async_save.saver()._writer._process.pid
"""


def script(there: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@linux
def test_at_its_end_a_script_waits_for_its_last_save(there: Path) -> None:
    done = script(there, 'keep("last", b"x" * 50_000_000); print(writer())')
    assert done.returncode == 0, done.stderr
    assert (there / "last").stat().st_size == 50_000_000
    wait(lambda: gone(int(done.stdout)))


@linux
def test_a_script_that_fails_still_writes_its_last_save_and_its_error(there: Path) -> None:
    done = script(there, 'keep("last", b"x" * 5_000_000); raise SystemExit(3)')
    assert done.returncode == 3
    assert (there / "last").stat().st_size == 5_000_000
    (there / "last").unlink()
    there.rmdir()
    there.write_text("in the way", encoding="utf-8")
    done = script(there, 'keep("last", b"x")')
    assert done.returncode == 0
    assert "checkpoint last could not be written" in done.stderr


@linux
def test_a_terminated_script_may_end_before_its_checkpoint_is_written(there: Path) -> None:
    """SIGTERM to both processes, as from the launcher; the script has no handler."""
    done = script(
        there,
        """
        keep("last", b"x" * 50_000_000)
        print(writer(), flush=True)
        for pid in (writer(), os.getpid()):
            os.kill(pid, signal.SIGTERM)
        """,
    )
    assert done.returncode == -signal.SIGTERM
    wait(lambda: gone(int(done.stdout)))
    assert (there / "last").stat().st_size == 50_000_000
    assert commits(there)[0]["name"] == "last"


@linux
def test_a_script_that_is_killed_leaves_nothing_half_written(there: Path) -> None:
    for moment in range(5):
        done = script(
            there,
            f"""
            keep("last", b"x" * 50_000_000)
            time.sleep({moment * 0.02})
            print(writer(), flush=True)
            for pid in (writer(), os.getpid()):
                os.kill(pid, signal.SIGKILL)
            """,
        )
        assert done.returncode == -signal.SIGKILL
        names = [name for name in os.listdir(there) if not name.endswith(".tmp")] if there.exists() else []
        assert names in ([], ["last"])
        if names:
            assert (there / "last").stat().st_size == 50_000_000


@linux
def test_a_writer_that_was_killed_is_an_error_and_the_next_save_starts_another(there: Path) -> None:
    done = script(
        there,
        """
        keep("first", b"1")
        async_save.saver().wait()
        first = writer()
        os.kill(first, signal.SIGSTOP)
        keep("second", b"2")
        os.kill(first, signal.SIGKILL)
        try:
            async_save.saver().wait()
        except RuntimeError as exc:
            print(exc)
        keep("third", b"3")
        assert writer() != first
        os.kill(writer(), signal.SIGKILL)  # while it has nothing to do, or much
        try:
            async_save.saver().wait()
        except RuntimeError:
            pass
        keep("fourth", b"4")
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "checkpoint second could not be written: the writer process ended with -9" in done.stdout
    assert {"first", "fourth"} <= set(os.listdir(there))


@linux
def test_a_forked_child_neither_waits_for_its_parent_nor_holds_its_writer(there: Path) -> None:
    done = script(
        there,
        """
        keep("parent", b"1" * 5_000_000)
        mine = writer()
        child = os.fork()
        if child == 0:
            assert async_save.saver().pending is None
            keep("child", b"2")
            async_save.saver().finish()
            time.sleep(30)
            os._exit(0)
        async_save.saver().finish()  # returns only when the writer has seen the end of its pipe
        print(os.path.exists(f"/proc/{mine}"))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
    assert (there / "parent").stat().st_size == 5_000_000


# -- several processes, one checkpoint ---------------------------------------------------------------------------


def part(rank: int, ranks: int, token: str = "t") -> dict[str, Any]:
    expected = [f"__{other}_0.distcp" for other in range(ranks)]
    more = {"part_of": {"token": token, "files": expected}, "keep": None}
    return {**request("step-1", size=0), **more, "files": {expected[rank]: [["raw", [rank * 10, 10]]]}}


def test_the_last_to_write_its_part_puts_the_whole_in_its_place(there: Path) -> None:
    memory = memoryview(b"0" * 10 + b"1" * 10 + b"2" * 10)
    assert writer_process.perform(part(2, 3), memory) is None
    assert writer_process.perform(part(0, 3), memory) is None
    assert [name for name in os.listdir(there) if not name.startswith(".")] == []
    assert writer_process.perform(part(1, 3), memory) == str(there / "step-1")
    found = {path.name: path.read_bytes() for path in (there / "step-1").iterdir()}
    assert found == {f"__{rank}_0.distcp": str(rank).encode() * 10 for rank in range(3)}
    assert os.listdir(there) == ["step-1"]
    assert len(commits(there)) == 1


def test_parts_of_a_save_that_failed_never_meet_those_of_the_next(there: Path) -> None:
    memory = memoryview(b"0" * 10 + b"1" * 10)
    assert writer_process.perform(part(0, 2, "first"), memory) is None
    assert writer_process.perform(part(1, 2, "second"), memory) is None
    assert writer_process.perform(part(0, 2, "second"), memoryview(b"n" * 20)) == str(there / "step-1")
    assert (there / "step-1" / "__0_0.distcp").read_bytes() == b"n" * 10


def test_an_archive_for_torch_is_verified(there: Path) -> None:
    there.mkdir(parents=True)
    data = b"\x80\x02}q\x00." + bytes(58)
    with (there / "a.pt").open("wb", buffering=0) as file:
        archive.write(file, [("archive/data.pkl", 0, 6), ("archive/version", 6, 3)], memoryview(data))
    assert verify.verify_unit(str(there), "a.pt", ["a.pt"]).ok is True
