"""Real writers are killed after every single operation. Each offered checkpoint is complete, and each
complete checkpoint is offered."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.task import layout
from support.checkpoints.replaying import NAMES, Player, Trace, Tree, tree
from support.checkpoints.scanning import Task

POINTERS = ("checkpoint",)
States = dict[str, list[Tree]]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: these tests make thousands of copies, and no power is cut."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


def offered(task: Task) -> list[tuple[str, Tree]]:
    """The content of each checkpoint that would be restored."""
    found = []
    for record in task.offered:
        paths = [file["path"] for file in record["files"] if file["path"] not in POINTERS]
        found.append((record["name"], {path: task.staged(record, path) for path in paths}))
    return found


def check(task: Task, states: States, finished: dict[str, int]) -> None:
    """`finished`: how many complete states of each checkpoint existed long enough to be seen."""
    seen = offered(task)
    for name, files in seen:
        assert files in states.get(name, []), (
            f"{name} was offered in a state that no finished save has left behind"
        )
    for name, count in finished.items():
        for state in states[name][:count]:
            assert (name, state) in seen, f"a finished {name} was not offered"


def killed_after(trace: Trace, count: int, root: Path) -> Task:
    """The writer performs this many operations and is killed. Some seconds pass between its saves."""
    root.mkdir()
    task = Task(root).begin()
    with Player(trace, task.dir) as player:
        for number, op in enumerate(trace.ops[:count]):
            player.play(op)
            if number > count - 20:
                task.poll(0.01)
            if op[0] == "done":
                task.pass_time(4.0, step=1.0)
    task.scanner.finish(violent=True)
    task.close()
    return task


@pytest.mark.parametrize("name", NAMES)
def test_killed_after_every_operation(name: str, place: Path) -> None:
    trace = Trace(name)
    states = trace.complete(place / "complete")
    finished: dict[str, int] = {}
    for count in range(len(trace.ops) + 1):
        if count and trace.ops[count - 1][0] == "done":
            for unit in trace.ops[count - 1][1]:
                finished[unit] = finished.get(unit, 0) + 1
        task = killed_after(trace, count, place / str(count))
        check(task, states, finished)
        shutil.rmtree(task.root)


@pytest.mark.parametrize("waiting", [True, False], ids=["seconds between saves", "no time between saves"])
@pytest.mark.parametrize("name", NAMES)
def test_launcher_killed_with_it(name: str, waiting: bool, place: Path) -> None:
    """A new scanner finds the directory as both left it, also after half a write."""
    trace = Trace(name)
    states = trace.complete(place / "complete")
    finished: dict[str, int] = {}
    task = Task(place / "task").begin()
    with Player(trace, task.dir) as player:
        for number, op in enumerate(trace.ops):
            if op[0] == "write":
                player.play(op, last=0.5)
                check_collected(task, place / f"{number}-torn", states, finished)
                player.play(op, first=0.5)
            else:
                player.play(op)
            task.poll(0.01)
            if op[0] == "done" and waiting:
                task.pass_time(4.0, step=1.0)
                for unit in op[1]:
                    finished[unit] = finished.get(unit, 0) + 1
            check_collected(task, place / str(number), states, finished)
    task.close()


def check_collected(task: Task, root: Path, states: States, finished: dict[str, int]) -> None:
    # Hard links keep inodes and times.
    shutil.copytree(task.root, root, copy_function=os.link)
    # The new scanner appends to these files; the originals must stay as they are.
    for name in (layout.JOURNAL, layout.SCAN):
        if (root / name).exists():
            (root / name).unlink()
            shutil.copyfile(task.root / name, root / name)
    other = Task(root, blind=True).begin()
    other.scanner.finish(violent=True)
    other.close()
    check(other, states, finished)
    shutil.rmtree(root)


@pytest.mark.parametrize("name", NAMES)
def test_a_clean_end_offers_all_files(name: str, place: Path) -> None:
    trace = Trace(name)
    task = Task(place).begin()
    with Player(trace, task.dir) as player:
        for op in trace.ops:
            player.play(op)
    task.scanner.finish(violent=False)
    task.close()
    seen = offered(task)
    saved = {unit for op in trace.ops if op[0] == "done" for unit in op[1]}
    assert saved
    for unit in saved:
        left = tree(task.dir, unit)
        assert not left or (unit, left) in seen
    assert {unit for unit, _ in seen} <= saved


def flipped(data: bytes) -> Iterator[bytes]:
    """The same bytes with one of them changed, at places spread over the file."""
    for at in range(len(data) // 16, len(data), max(1, len(data) // 8)):
        yield data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]


@pytest.mark.parametrize("name", ["torch_in_place", "lightning", "keras_zip", "numpy", "plain", "tensorflow"])
def test_cut_off_files_are_never_offered(name: str, place: Path) -> None:
    """A format that shows that something is missing counts also for a quiet, closed file."""
    trace = Trace(name)
    states = trace.complete(place / "complete")
    for number, (unit, versions) in enumerate(sorted(states.items())):
        for path, data in versions[-1].items():
            if path.endswith((".dat", ".bin")):
                continue  # Raw bytes: they do not show their length.
            for part, cut in enumerate((1, len(data) // 3, len(data) - 10)):
                task = Task(place / f"{number}-{part}-{path.replace('/', '-')}").begin()
                for other, whole in versions[-1].items():
                    task.write(other, whole[:-cut] if other == path else whole)
                task.pass_time(5)
                task.scanner.finish(violent=bool(part % 2))
                task.close()
                assert task.names == []
                assert [entry["name"] for entry in task.entries("rejected")] == [unit]


@pytest.mark.parametrize("name", ["torch_in_place", "numpy", "tensorflow"])
def test_a_flipped_bit_is_never_offered_where_there_are_checksums(name: str, place: Path) -> None:
    trace = Trace(name)
    states = trace.complete(place / "complete")
    unit = {"torch_in_place": "last.pt", "numpy": "last.npz", "tensorflow": "ckpt-3"}[name]
    whole = states[unit][-1]
    for number, (path, data) in enumerate(whole.items()):
        for spot, damaged in enumerate(flipped(data)):
            task = Task(place / f"{number}-{spot}").begin()
            for other, content in whole.items():
                task.write(other, damaged if other == path else content)
            task.scanner.finish(violent=True)
            task.close()
            for _, files in offered(task):
                assert meaning(files[path]) == meaning(data)


def meaning(data: bytes) -> object:
    """The content of a zip archive without its padding and time stamps, in which damage does no harm."""
    if not data.startswith(b"PK"):
        return data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
