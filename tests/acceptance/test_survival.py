"""Runs outlive the server; killed runs resume from their checkpoint; nothing is lost or duplicated."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.client.local import connect
from support.box import Box
from support.gangs import lines
from support.waiting import wait

COUNT = """
import json, os, sys, time
directory = os.environ["STOKER_CHECKPOINT_DIR"]
first = 0
if "STOKER_RESUME_FROM" in os.environ:
    first = json.load(open(os.environ["STOKER_RESUME_FROM"]))["step"] + 1
print("from", first, flush=True)
for step in range(first, int(sys.argv[1])):
    path = os.path.join(directory, "state.json")
    with open(path + ".tmp", "w") as file:
        json.dump({"step": step, "filler": "x" * 1000}, file)
    os.replace(path + ".tmp", path)
    print("step", step, flush=True)
    time.sleep(float(sys.argv[2]))
print("done", flush=True)
"""

REPORT = """
import sys, time
import stoker
for step in range(int(sys.argv[1])):
    stoker.report(step=step, loss=1.0 / (step + 1))
    print("step", step, flush=True)
    stoker.checkpoint.save("state.txt", str(step), step=step)
    time.sleep(0.02)
print("complete", file=sys.stderr)
"""


def said(box: Box, run: str, attempt: int) -> list[str]:
    """The output of an attempt, without a new process for each call."""
    with connect(box.home) as client:
        records = list(client.logs(run, attempt=attempt))
    return [record["text"] for record in records if record.get("stream") == "stdout"]


def test_jobs_finish_while_the_server_is_dead(box: Box) -> None:
    box.write("train.py", REPORT)
    runs = [box.submit("--name", f"job-{n}", "--cpu", "0.5", "train.py", "100") for n in range(3)]
    for run in runs:
        box.until(run, "running")
    box.kill_server()
    records = [path for run in runs for path in box.home.tasks.glob(f"{run}/1/worker-0/status.json")]
    wait(lambda: all(json.loads(path.read_text())["phase"] == "ended" for path in records))
    for run in runs:
        shown = box.ended(run)
        assert (shown["state"], shown["exit_code"], len(shown["attempts"])) == ("succeeded", 0, 1)
        assert lines(box, run, "--stdout") == [f"step {n}" for n in range(100)]
        points = box.client().metric(run, "loss")["points"]
        assert [(point[0], round(point[1], 6)) for point in points] == [
            (n, round(1 / (n + 1), 6)) for n in range(100)
        ]
        kept = [checkpoint for checkpoint in shown["checkpoints"] if checkpoint["kept"]]
        assert kept[-1]["step"] == 99 and len(kept) == 3


def test_a_follower_sees_every_line_once_across_server_kills(box: Box) -> None:
    box.write("train.py", REPORT)
    follower = subprocess.Popen(
        [sys.executable, "-m", "stoker.cli.main", "run", "train.py", "150"],
        cwd=box.work, env=box.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for _ in range(3):
            pid = wait(box.server_pid)
            wait(lambda: box.client().runs(state=("running", "succeeded"))["runs"])
            box.kill_server()
            wait(lambda before=pid: box.server_pid() not in (None, before) or follower.poll() is not None)
        out, err = follower.communicate(timeout=120)
    finally:
        follower.kill()
        follower.communicate()
    assert follower.returncode == 0, err
    assert out.splitlines() == [f"step {n}" for n in range(150)]


def test_a_killed_launcher_takes_its_processes_along_and_the_run_resumes(box: Box) -> None:
    box.write("train.py", COUNT)
    run = box.submit("train.py", "60", "0.05")
    wait(lambda: any(line.startswith("step 9") for line in lines(box, run)))
    children = _descendants(box.launcher(run))
    assert children
    os.kill(box.launcher(run), signal.SIGKILL)
    wait(lambda: not any(Path(f"/proc/{pid}").exists() and _state(pid) != "Z" for pid in children))
    shown = box.ended(run)
    assert shown["state"] == "succeeded"
    assert [attempt["cause"] for attempt in shown["attempts"]] == ["lost", "completed"]
    assert shown["attempts"][0]["evidence"]["proof"]
    resumed = int(lines(box, run, "--attempt", "2")[0].split()[1])
    last = [line for line in lines(box, run, "--attempt", "1") if line.startswith("step")][-1]
    assert resumed >= int(last.split()[1]), "more than the step in flight was lost"


def test_after_a_reboot_runs_resume(box: Box) -> None:
    """All processes are gone and the boot id is new, as after a power cut."""
    box.write("train.py", COUNT)
    run = box.submit("train.py", "40", "0.05")
    wait(lambda: any(line.startswith("step 9") for line in lines(box, run)))
    launcher = box.launcher(run)
    box.kill_server()
    os.kill(launcher, signal.SIGKILL)
    wait(lambda: not Path(f"/proc/{launcher}").exists() or _state(launcher) == "Z")
    for record in (box.home.engine / "tasks").glob("*.json"):
        known = json.loads(record.read_text())
        record.write_text(json.dumps({**known, "boot_id": "00000000-0000-0000-0000-000000000000"}))
    shown = box.ended(run)
    assert (shown["state"], len(shown["attempts"])) == ("succeeded", 2)
    assert "restarted" in shown["attempts"][0]["evidence"]["proof"]


ALONE = """
import fcntl, os
lock = open(PLACE, "w")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where another body of this run lives
"""


@pytest.mark.parametrize("lost", ["the directory", "its files"])
def test_a_run_whose_task_directory_is_lost_goes_on_from_its_checkpoint(box: Box, lost: str) -> None:
    """The body in the lost directory ends before the next one starts."""
    box.write("train.py", ALONE.replace("PLACE", repr(str(box.work / "lock"))) + COUNT)
    run = box.submit("train.py", "60", "0.05")
    wait(lambda: any(line.startswith("step 19") for line in said(box, run, 1)))
    box.kill_server()
    directory = box.home.tasks / run / "1" / "worker-0"

    def is_lost() -> bool:
        shutil.rmtree(directory, ignore_errors=True)  # its launcher removes files meanwhile, and makes some
        return not directory.exists()

    wait(is_lost)
    if lost == "its files":
        directory.mkdir()
    shown = box.ended(run)
    assert [attempt["cause"] for attempt in shown["attempts"]] == ["lost", "completed"]
    assert shown["state"] == "succeeded"
    resumed = int(said(box, run, 2)[0].split()[1])
    assert resumed >= 10, "the kept checkpoints were not used"
    texts = [event["text"] for event in box.client().events(run)["events"]]
    assert any("goes on from its checkpoint" in text for text in texts), texts


@pytest.mark.long
@pytest.mark.timeout(600)
def test_thirty_kills_in_a_row_lose_at_most_what_was_in_flight(box: Box) -> None:
    seed = 20
    print(f"seed {seed}")
    chance = random.Random(seed)
    box.write("train.py", COUNT)
    run = box.submit("--retries", "60", "train.py", "1000000", "0.02")
    reached = 0
    for kill in range(30):
        wait(lambda after=reached, number=kill + 1: _steps(said(box, run, number))[-1:] > [after])
        time.sleep(chance.uniform(0, 0.3))  # a random moment, not always right after a save
        how = chance.choice(["process", "launcher"])
        box("drill", run, "--how", how)
        again = wait(lambda number=kill + 2: said(box, run, number))
        before = _steps(said(box, run, kill + 1))
        resumed = int(again[0].split()[1])
        # The last line may belong to a step whose checkpoint was just renamed, so the run may resume after
        # it.
        assert resumed >= before[-1], f"kill {kill} ({how}): did step {before[-1]}, went on at {resumed}"
        reached = before[-1]
    box("stop", run, "--kill")


def _steps(found: list[str]) -> list[int]:
    # The kill may cut the last line before its number.
    return [int(words[1]) for line in found if len(words := line.split()) == 2 and words[0] == "step"]


def _descendants(pid: int) -> list[int]:
    found = []
    todo = [pid]
    while todo:
        children = Path(f"/proc/{todo[0]}/task/{todo[0]}/children")
        todo.pop(0)
        if children.exists():
            new = [int(child) for child in children.read_text().split()]
            found += new
            todo += new
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "X"


NAMED = """
import os, time
directory = os.environ["STOKER_CHECKPOINT_DIR"]

def save(name, text):
    with open(f"{directory}/{name}.tmp", "w") as file:
        file.write(text)
    os.replace(f"{directory}/{name}.tmp", f"{directory}/{name}")

found = sorted(os.listdir(directory))
print("found", *found, flush=True)
if not found:
    save("best.json", "1")
    save("last.json", "2")
    save("step-2.json", "2")
    save("step-3.json", "3")
    time.sleep(600)
print(*(open(f"{directory}/{name}").read() for name in found), flush=True)
"""


@pytest.mark.shared_server
def test_a_checkpoint_is_restored_by_its_own_name_too(box: Box) -> None:
    """Lightning saves `step=3.ckpt` and `last.ckpt`, and resumes from the latter."""
    box.write("train.py", NAMED)
    run = box.submit("--checkpoint-keep", "4", "train.py")
    wait(lambda: len(box.show(run)["checkpoints"]) == 4)
    box("drill", run, "--how", "launcher")
    assert box.ended(run)["state"] == "succeeded"
    printed = lines(box, run)
    assert printed[-2:] == ["found best.json last.json step-3.json", "1 2 3"]
