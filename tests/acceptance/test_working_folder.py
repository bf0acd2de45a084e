"""Scripts that know nothing of Stoker: what they write into their working folder is kept, and they go on from it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.box import Box
from support.ordinary_script import TRAIN
from support.waiting import wait

pytestmark = pytest.mark.shared_server


def texts(box: Box, run: str, kind: str) -> list[str]:
    return [event["text"] for event in box.client().events(run)["events"] if event["kind"] == kind]


def log(box: Box, run: str) -> str:
    return box("logs", run).stdout


def test_a_killed_script_goes_on_from_its_own_files_and_all_are_kept(box: Box, tmp_path: Path) -> None:
    go = tmp_path / "go"
    box.write("train.py", TRAIN)
    run = box.submit("--retries", "1", "train.py", "--wait", str(go))
    wait(lambda: log(box, run), lambda text: "epoch 1" in text)
    os.kill(body(box, run, "worker-0"), signal.SIGKILL)
    assert box.ended(run)["state"] == "succeeded"
    assert [line for line in log(box, run).splitlines() if "from" in line] == ["from 0", "from 2"]
    (said,) = texts(box, run, "restored")
    assert said.startswith("attempt 2 goes on in the working folder of attempt 1: 3 files, newest ")
    assert box.show(run)["folder"]["files"] == 5
    assert "Working folder\n  5 files" in box("show", run).stdout
    box("pull", run)
    pulled = box.work / run / "files"
    assert sorted(str(path.relative_to(pulled)) for path in pulled.rglob("*") if path.is_file()) == [
        "checkpoints/last.pkl",
        "plot.png",
        "runs/exp/log.csv",
        "up-1-1-0",
        "up-2-1-0",
    ]
    assert (pulled / "runs/exp/log.csv").read_text().split() == ["0", "1", "2", "3"]


def test_resume_goes_on_in_the_folder(box: Box) -> None:
    box.write("train.py", TRAIN)
    run = box.submit("train.py", "--epochs", "2")
    box.ended(run)
    box("resume", run)
    box.ended(run)
    assert [line for line in log(box, run).splitlines() if "from" in line] == ["from 0", "from 2"]


def test_workers_on_one_machine_share_the_folder_and_start_at_one_step(box: Box, tmp_path: Path) -> None:
    go = tmp_path / "go"
    box.write("train.py", TRAIN)
    run = box.submit(
        "--workers", "2", "--retries", "1", "--cpu", "0.2", "train.py", "--together", "--wait", str(go)
    )
    wait(lambda: log(box, run), lambda text: text.count("epoch 1") == 2)
    os.kill(body(box, run, "worker-1"), signal.SIGKILL)
    assert box.ended(run)["state"] == "succeeded"
    begun = sorted(line for line in log(box, run).splitlines() if "from" in line)
    assert begun == ["[worker-0] from 0", "[worker-0] from 2", "[worker-1] from 0", "[worker-1] from 2"]
    assert {file["path"] for file in box.client().files(run, what="files")["files"]} == {
        "checkpoints/last.pkl",
        "plot.png",
        "runs/exp/log.csv",
        "up-1-1-0",
        "up-1-1-1",
        "up-1-2-0",
        "up-1-2-1",
    }


def test_what_is_left_out_is_said(box: Box) -> None:
    box.write(".stokerignore", "data/\n")
    box.write(
        "write.py",
        """
import os
os.makedirs("data", exist_ok=True)
for name, size in (("data/set.bin", 10), ("big.bin", 3000000), ("small.bin", 10), ("note.log", 10)):
    with open(name, "wb") as file:
        file.write(b"x" * size)
""",
    )
    run = box.submit("--keep-files", "!*.log", "--keep-files", "1Mi", "write.py")
    box.ended(run)
    assert [file["path"] for file in box.client().files(run, what="files")["files"]] == ["small.bin"]
    over, ignored = texts(box, run, "warning")
    assert "1 file of 2.9 MiB are not kept, among them big.bin" in over
    assert ignored == "not kept because .stokerignore names them: data"
    none = box.submit("--keep-files", "none", "write.py")
    box.ended(none)
    assert box.show(none)["folder"] is None
    refused = box("pull", none, code=None)
    assert refused.returncode != 0 and "has no outputs" in refused.stderr


def body(box: Box, run: str, task: str) -> int:
    """The main process of a task."""
    launcher = int(box.record(run, task=task)["pid"])
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return int(children[0])
