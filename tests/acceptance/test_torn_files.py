"""An ordinary script that resumes by itself from a file that it writes in place goes on after a kill in the middle of a save."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.box import Box
from support.waiting import wait

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux")

TRAIN = """
import io, os, sys, time, zipfile

def save(step, slowly):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("step", str(step))
        file.writestr("weights", bytes(100000))
    data = buffer.getvalue()
    with open("snapshot.pt", "wb") as file:
        file.write(data[:50000])
        file.flush()
        if slowly:
            print("in the middle of", step, flush=True)
            time.sleep(1000)
        file.write(data[50000:])

first = 0
if os.path.exists("snapshot.pt"):
    with zipfile.ZipFile("snapshot.pt") as file:
        first = int(file.read("step")) + 1
print("from", first, flush=True)
for step in range(first, 4):
    if first == 0 and step == 3:
        while not os.path.exists("go"):
            time.sleep(0.01)
    save(step, slowly=first == 0 and step == 3)
print("done", flush=True)
"""


def kill_bodies(box: Box, run: str) -> None:
    """SIGKILL for every training process of the run."""
    mark = f"STOKER_RUN={run}\0".encode()
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and mark in Path(f"/proc/{name}/environ").read_bytes():
                found.append(int(name))
        except OSError:
            continue
    assert found
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def test_a_script_that_writes_in_place_goes_on_from_the_version_before(box: Box) -> None:
    box.write("train.py", TRAIN)
    run = box.submit("--retries", "1", "train.py")
    box.until(run, "running")
    task = box.home.tasks / run / "1" / "worker-0"
    wait(lambda: len(list((task / "versions").glob("[0-9]*/snapshot.pt"))), what="a version")
    newest = (task / "code/snapshot.pt").read_bytes()
    wait(
        lambda: any(path.read_bytes() == newest for path in (task / "versions").glob("[0-9]*/snapshot.pt")),
        what="a version of the newest save",
    )
    (task / "code/go").write_bytes(b"")
    wait(lambda: "in the middle of 3" in box("logs", run).stdout)
    kill_bodies(box, run)
    shown = box.ended(run)
    assert (shown["state"], len(shown["attempts"])) == ("succeeded", 2)
    assert box("logs", run, "--attempt", "2").stdout.split("\n")[:2] == ["from 3", "done"]
    text = box("show", run).stdout
    assert (
        "snapshot.pt was being written when the process was killed; put back to the version written" in text
    )
