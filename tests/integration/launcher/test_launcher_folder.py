"""Files of the working folder that were torn when their writer was killed: real bodies, real launchers."""

from __future__ import annotations

import io
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest

from stoker.launcher.recovery import collect
from stoker.task import layout

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")

Make = Callable[..., Any]

REWRITE = """
import io, os, sys, time, zipfile
count, piece = int(sys.argv[1]), int(sys.argv[2])
os.makedirs("checkpoints", exist_ok=True)
def content(n):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("step", str(n))
        file.writestr("weights", bytes([n % 256]) * 200000)
    return buffer.getvalue()
n = 0
while n < count:
    n += 1
    data = content(n)
    with open("checkpoints/last.pt", "wb") as file:
        for at in range(0, len(data), piece):
            file.write(data[at : at + piece])
            file.flush()
            time.sleep(0.002)
    print("saved", n, flush=True)
    time.sleep(0.3)
"""
"""Rewrites a file in place, in pieces, again and again. Most of the time of a save it is torn."""


def write(it: Any, name: str, text: str) -> None:
    path = it.root / layout.CODE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def script(it: Any, text: str) -> list[str]:
    write(it, "train.py", text)
    return ["python3", "train.py"]


def step_in(path: Path) -> int:
    with numpy.load(io.BytesIO(path.read_bytes())) as file:
        return int(bytes(file["step"]))


def kill_body(it: Any) -> None:
    """The status has its pid in the launcher's own namespace only."""
    found = it.processes()
    assert found
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def saved(it: Any) -> int:
    lines = [line for line in it.text().split("\n") if line.startswith("saved ")]
    return int(lines[-1].split()[1]) if lines else 0


def has_saved(it: Any, count: int) -> bool:
    return bool(it.text().count("saved") >= count)


def is_torn(path: Path) -> bool:
    return path.stat().st_size < 200_000


def versions(it: Any) -> list[Path]:
    area = it.root / "versions"
    return sorted(path for path in area.glob("[0-9]*") if path.suffix != ".tmp") if area.exists() else []


def python() -> str:
    return os.path.dirname(shutil.which("python3") or "/usr/bin/python3")


def start(mode: Any, it: Any, *argv: str, **more: Any) -> Any:
    launcher = mode.start(it)
    it.run(*argv, env={"PATH": f"{python()}:/usr/bin:/bin"}, **more)
    return launcher


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_file_that_is_rewritten_in_place_always_loads(mode: Any, task: Make, seed: int) -> None:
    """The body is killed at random moments; the next generation finds a file that loads, and that is nearly the newest."""
    dice = random.Random(seed)
    it = task(guards=True)
    argv = script(it, REWRITE)
    path = it.root / layout.CODE / "checkpoints/last.pt"
    launcher = mode.start(it)
    put_back = 0
    for generation in range(1, 5):
        piece, saves, middle = dice.randint(2000, 8000), dice.randint(2, 3), dice.random() < 0.7
        known = it.text().count("saved")
        it.run(*argv, "1000", str(piece), generation=generation, env={"PATH": f"{python()}:/bin"})
        mode.wait_for(partial(has_saved, it, known + saves), "some saves")
        mode.wait_for(partial(versions, it), "a version")
        if middle:
            mode.wait_for(partial(is_torn, path), "the middle of a save")
        for _ in range(dice.randint(0, 300)):
            path.stat()
        kill_body(it)
        assert it.ending().kind == "signal"
        assert step_in(path) in range(saved(it) - 2, saved(it) + 2)
        entries = [entry for entry in it.journal("folder") if entry["generation"] == generation]
        assert [item["path"] for entry in entries for item in entry["put_back"]] in (
            [],
            ["checkpoints/last.pt"],
        )
        put_back += len(entries)
    assert put_back
    it.order("release")
    launcher.gone()
    assert not (it.root / "versions").exists()


HALF = REWRITE.replace("time.sleep(0.002)", "n == 3 and time.sleep(1000)").replace(
    "    data = content(n)",
    "    data = content(n)\n    while n == 3 and not os.path.exists('go'): time.sleep(0.01)",
)
"""Its third save, for which it waits, never ends."""


def has_version(it: Any, step: int) -> bool:
    return any(step_in(path / "checkpoints/last.pt") == step for path in versions(it))


def torn_save(mode: Any, it: Any) -> Path:
    """Have a body in the middle of a save that never ends, with a version of the save before if there is a guard."""
    argv = script(it, HALF)
    it.launcher = start(mode, it, *argv, "1000", "50000")
    return tear(mode, it)


def tear(mode: Any, it: Any) -> Path:
    path: Path = it.root / layout.CODE / "checkpoints/last.pt"
    it.said("saved 2")
    if it.near.info().guards:
        mode.wait_for(lambda: has_version(it, 2), "a version of the second save")
    (it.root / layout.CODE / "go").write_bytes(b"")
    mode.wait_for(lambda: path.stat().st_size == 50000, "half a file")
    return path


@pytest.mark.parametrize("mode", ["namespace", "guardian"], indirect=True)
def test_the_launcher_is_killed_instead_of_the_body(mode: Any, task: Make) -> None:
    it = task(guards=True)
    path = torn_save(mode, it)
    it.launcher.kill()
    it.launcher.gone()
    it.nothing_left()
    it.let_go()
    collect(str(it.root), 1)
    assert step_in(path) == 2
    assert [entry["put_back"][0]["path"] for entry in it.journal("folder")] == ["checkpoints/last.pt"]
    collect(str(it.root), 1)
    assert len(it.journal("folder")) == 1


def test_the_next_launcher_repairs_what_a_killed_one_left(mode: Any, task: Make) -> None:
    it = task(guards=True)
    path = torn_save(mode, it)
    it.launcher.kill()
    it.launcher.gone()
    it.nothing_left()
    it.let_go()
    mode.start(it)
    assert it.ending().kind == "lost"
    assert step_in(path) == 2
    kinds = [entry["k"] for entry in it.journal()]
    assert kinds.index("folder-plan") < kinds.index("folder") < kinds.index("ended")


def test_a_task_without_a_guard_leaves_the_folder_alone(mode: Any, task: Make) -> None:
    """As in a task directory that an earlier server made."""
    it = task()
    path = torn_save(mode, it)
    kill_body(it)
    it.ending()
    assert path.stat().st_size == 50000
    assert not (it.root / "versions").exists()


def test_tasks_that_share_a_folder_have_one_guard(mode: Any, task: Make, place: Path) -> None:
    common = place / layout.COMMON
    (common / layout.CODE).mkdir(parents=True)
    first = task("worker-0", common=str(common), guards=True)
    second = task("worker-1", common=str(common))
    for one in (first, second):
        (one.root / layout.CODE).symlink_to(common / layout.CODE)
    torn_save(mode, second)
    mode.start(first)
    first.run("sleep", "1000")
    first.phase("running")
    kill_body(second)
    second.ending()
    assert not (second.root / "versions").exists()
    # The first task was not there when the file was whole: it has nothing to put back, and sets it aside.
    with open(common / layout.CODE / "checkpoints/last.pt", "r+b") as file:
        file.write(b"PK")
    kill_body(first)
    first.ending()
    assert [entry["torn"] for entry in first.journal("folder")] == [["checkpoints/last.pt"]]
    assert (common / layout.CODE / "checkpoints/last.pt.torn").exists()


def test_a_half_written_numbered_directory_is_set_aside(mode: Any, task: Make) -> None:
    it = task(guards=True)
    argv = script(
        it,
        """
import os, time
for n in (10, 20):
    os.makedirs(f"out/checkpoint-{n}")
    for name in ("model.safetensors", "optimizer.pt", "notes.txt"):
        with open(f"out/checkpoint-{n}/{name}", "wb") as file:
            file.write(b"\\1" * 1000)
        if (n, name) == (20, "model.safetensors"):
            print("half", flush=True)
            time.sleep(1000)
    open("go", "wb").close()
    while os.path.exists("go"):
        time.sleep(0.01)
""",
    )
    start(mode, it, *argv)
    folder = it.root / layout.CODE
    state = it.root / layout.GUARD
    mode.wait_for(
        lambda: b"checkpoint-10" in state.read_bytes() if state.exists() else False, "a settled checkpoint"
    )
    (folder / "go").unlink()
    it.said("half")
    kill_body(it)
    it.ending()
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["checkpoint-10", "checkpoint-20.torn"]
    assert it.journal("folder")[0]["torn"] == ["out/checkpoint-20"]


def test_a_directory_of_three_files_is_put_back_as_a_whole(mode: Any, task: Make) -> None:
    """As accelerate's save_state writes it, always into the same directory."""
    it = task(guards=True)
    argv = script(
        it,
        """
import os, pickle, time
os.makedirs("state", exist_ok=True)
for n in (1, 2):
    for name in ("pytorch_model.bin", "optimizer.bin", "random_states_0.pkl"):
        with open(f"state/{name}", "wb") as file:
            pickle.dump({"step": n, "filler": "x" * 1000}, file)
        if n == 2:
            print("one of three", flush=True)
            time.sleep(1000)
    while os.path.exists("../code/wait"):
        time.sleep(0.01)
""",
    )
    folder = it.root / layout.CODE
    (folder / "wait").write_bytes(b"")
    start(mode, it, *argv)
    mode.wait_for(lambda: versions(it), "a version")
    (folder / "wait").unlink()
    it.said("one of three")
    kill_body(it)
    it.ending()
    assert [[item["path"] for item in entry["put_back"]] for entry in it.journal("folder")] == [["state"]]
    loaded = {path.name: b"\x4b\x01" in path.read_bytes() for path in (folder / "state").iterdir()}
    assert loaded == {"pytorch_model.bin": True, "optimizer.bin": True, "random_states_0.pkl": True}


def test_a_log_keeps_its_last_line_and_a_renamed_file_stays(mode: Any, task: Make) -> None:
    it = task(guards=True)
    argv = script(
        it,
        """
import os, time
log = open("train.log", "a")
table = open("loss.csv", "a")
n = 0
while True:
    n += 1
    for file in (log, table):
        print(n, file=file, flush=True)
    with open("last.bin.tmp", "wb") as file:
        file.write(b"%d" % n)
    os.replace("last.bin.tmp", "last.bin")
    print("step", n, flush=True)
    time.sleep(0.05)
""",
    )
    start(mode, it, *argv)
    it.said("step 10\n")
    kill_body(it)
    it.ending()
    folder = it.root / layout.CODE
    steps = [int(line.split()[1]) for line in it.text().split("\n") if line.startswith("step")]
    assert (folder / "train.log").read_text().split()[-1] in (str(steps[-1]), str(steps[-1] + 1))
    assert (folder / "loss.csv").read_text().split()[-1] in (str(steps[-1]), str(steps[-1] + 1))
    assert int((folder / "last.bin").read_bytes()) in (steps[-1], steps[-1] + 1)
    assert it.journal("folder") == []


def test_a_worker_is_killed_and_its_parent_ends_with_an_error(mode: Any, task: Make) -> None:
    """As torchrun does: no signal ends the body itself."""
    it = task(guards=True)
    write(it, "worker.py", HALF)
    argv = script(
        it,
        """
import os, signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "worker.py", "1000", "50000"])
while not os.path.exists("kill"):
    time.sleep(0.01)
worker.kill()
worker.wait()
sys.exit(1)
""",
    )
    start(mode, it, *argv)
    path = tear(mode, it)
    (it.root / layout.CODE / "kill").write_bytes(b"")
    assert it.ending().code == 1
    assert step_in(path) == 2
    assert [entry["violent"] for entry in it.journal("folder")] == [False]


def test_a_full_disk_is_said_once_and_harms_nothing(mode: Any, task: Make, place: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    it = task(guards=True)
    (it.root / "versions").mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(it.root / "versions")]
    if subprocess.run(small, capture_output=True).returncode:
        pytest.skip("no small disk can be mounted")
    try:
        start(mode, it, *script(it, REWRITE), "6", "100000")
        mode.wait_for(lambda: it.journal("warning"), "a warning")
        assert it.ending().code == 0
        assert len(it.journal("warning")) == 1
        assert step_in(it.root / layout.CODE / "checkpoints/last.pt") == 6
    finally:
        subprocess.run(["umount", "-l", str(it.root / "versions")], check=True)
