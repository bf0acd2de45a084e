"""The examples run, and so does every command of the README and the docs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.box import Box
from support.waiting import wait

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"


@pytest.mark.shared_server
@pytest.mark.long
def test_digits_to_its_final_accuracy(box: Box) -> None:
    shutil.copytree(EXAMPLES / "digits", box.work, dirs_exist_ok=True)
    done = box("submit", "stoker.yaml", timeout=280)
    final = re.search(r"final accuracy ([0-9.]+) after 60 epochs on 2 worker", done.stdout)
    assert final is not None, done.stdout
    assert float(final.group(1)) > 0.95
    shown = box.json("show", "@last")
    assert shown["outputs"]["files"] == 1
    kept = [checkpoint for checkpoint in shown["checkpoints"] if checkpoint["kept"]]
    # On a fast machine the run may end before retention removes the first checkpoint.
    assert 1 <= len(kept) <= 4
    assert max(checkpoint["metrics"]["accuracy"] for checkpoint in kept) > 0.95


def test_digits_without_stoker(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "digits/train.py"), "--epochs", "2"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "final accuracy" in done.stdout


@pytest.mark.shared_server
def test_a_plain_script_resumes(box: Box) -> None:
    shutil.copytree(EXAMPLES / "plain", box.work, dirs_exist_ok=True)
    run = box.submit("--env", "STEPS=40", "--env", "PACE=0.1", "--retries", "1", "train.py")
    wait(lambda: "step 3" in box("logs", run).stdout)
    box("drill", run, "--how", "process")
    assert box.ended(run)["state"] == "succeeded"
    lines = box("logs", run).stdout.splitlines()
    assert any(line.startswith("resumed at step") for line in lines)
    assert sum(line.startswith("step 39 ") for line in lines) == 1


@pytest.mark.long
def test_the_readme_tells_the_truth(box: Box) -> None:
    """The README's own script, and every `$ stoker ...` line of its first chapter, in order."""
    box.write("train.py", _blocks("python")[0])
    first = _commands(_blocks("console")[0])
    assert len(first) > 8
    for words in first:
        if words[0] == "drill":
            # A user who types these lines has a checkpoint by now.
            wait(lambda: "step 20 " in box("logs", words[1]).stdout)  # noqa: B023
        box(*words, code=None if words[0] == "doctor" else 0)
    assert (box.work / "model" / "model.json").is_file()
    runs = [run for run in box.json("ps", "--all") if run["name"] == "fit"]
    (drilled,) = [run["id"] for run in runs if run["state"] == "succeeded"]
    assert len(box.show(drilled)["attempts"]) == 2
    lines = box("logs", drilled).stdout.splitlines()
    assert sum(line.startswith("step 100 ") for line in lines) == 1


@pytest.mark.shared_server
def test_the_readmes_workers(box: Box) -> None:
    shutil.copytree(EXAMPLES / "digits", box.work, dirs_exist_ok=True)
    commands = [words for block in _blocks("console")[1:] for words in _commands(block)]
    assert commands
    for words in commands:
        box(*words)


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def _commands(block: str) -> list[list[str]]:
    lines = [shlex.split(line[2:]) for line in block.splitlines() if line.startswith("$ ")]
    assert all(words[0] == "stoker" for words in lines)
    return [words[1:] for words in lines]


def test_the_readmes_job_file_is_valid() -> None:
    from stoker.spec import parse_job

    blocks = _blocks("yaml")
    assert blocks
    for block in blocks:
        parse_job(block)


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("stoker.yaml")), ids=lambda path: path.parent.name)
def test_example_job_files_are_valid(path: Path) -> None:
    from stoker.spec import load_job, refuse_unsupported

    refuse_unsupported(load_job(path), "local")


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
