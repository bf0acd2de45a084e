"""Data outside the working folder: links to it, empty folders, inputs of this machine, and what is said when it is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.box import Box

pytestmark = pytest.mark.shared_server


def test_links_and_empty_folders_of_the_working_folder_are_in_the_run(box: Box, tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train.csv").write_text("1,2,3")
    (box.work / "data").symlink_to(tmp_path / "mnist")
    (box.work / "logs" / "tb").mkdir(parents=True)
    box.write(
        "train.py",
        """
import os
print("link", os.readlink("data"), open("data/train.csv").read(), os.listdir("logs/tb"))
open("logs/tb/events", "w").close()
""",
    )
    run = box.submit("train.py")
    ended = box.ended(run)
    assert ended["state"] == "succeeded", box("logs", run).stdout
    assert f"link {tmp_path / 'mnist'} 1,2,3 []" in box("logs", run).stdout
    assert [file["path"] for file in box.client().files(run, what="files")["files"]] == ["logs/tb/events"]
    assert sorted(os.listdir(tmp_path / "mnist")) == ["train.csv"], "the data is where it was"
    box("resume", run)
    box.ended(run)
    assert box("logs", run).stdout.count("link ") == 2, "a resume has the link again"
    again = str(box.json("rerun", "-d", run)["id"])
    assert box.ended(again)["state"] == "succeeded"
    assert f"link {tmp_path / 'mnist'} 1,2,3 []" in box("logs", again).stdout, "and so has a rerun"


def test_an_input_of_this_machine(box: Box, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text("1,2,3")
    box.write("train.py", "import os; print(open(os.environ['STOKER_INPUT_BIG_SET'] + '/train.csv').read())")
    done = box("run", "--input", f"big-set=file://{tmp_path}/set", "train.py")
    assert done.stdout == "1,2,3\n"
    refused = box("run", "--input", f"big-set=file://{tmp_path}/none", "train.py", code=None)
    assert refused.returncode != 0 and f"there is no {tmp_path}/none on this machine" in refused.stderr


def test_a_file_that_was_not_shipped_is_named_with_the_remedy(box: Box) -> None:
    box.write(".gitignore", "data/\n")
    box.write("data/train.csv", "1,2,3")
    box.write("train.py", "open('data/train.csv')")
    failed = box("run", "train.py", code=1)
    said = "data/train.csv is here and was not shipped, because .gitignore leaves out data/: write `!/data/` into"
    assert said in failed.stderr
    assert said in box("why", "@last").stdout.replace("\n", " ")
    box.write(".stokerignore", "!/data/\n")
    assert box("run", "train.py").returncode == 0
