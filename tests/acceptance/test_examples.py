"""The examples run, and so does every command the README and the docs show."""

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


def test_digits_to_its_final_accuracy(box: Box) -> None:
    shutil.copytree(EXAMPLES / "digits", box.work, dirs_exist_ok=True)
    done = box("submit", "stoker.yaml", timeout=280)
    final = re.search(r"final accuracy ([0-9.]+) after 60 epochs on 2 worker", done.stdout)
    assert final is not None, done.stdout
    assert float(final.group(1)) > 0.95
    shown = box.json("show", "@last")
    assert shown["outputs"]["files"] == 1
    kept = [checkpoint for checkpoint in shown["checkpoints"] if checkpoint["kept"]]
    # On a fast machine it is over before the first one is known to be nobody else's business.
    assert 1 <= len(kept) <= 4
    assert max(checkpoint["metrics"]["accuracy"] for checkpoint in kept) > 0.95


def test_digits_without_stoker(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "digits/train.py"), "--epochs", "2"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "final accuracy" in done.stdout


def test_a_plain_script_resumes(box: Box) -> None:
    shutil.copytree(EXAMPLES / "plain", box.work, dirs_exist_ok=True)
    run = box.submit("--env", "STEPS=40", "--env", "PACE=0.1", "--retries", "1", "train.py")
    wait(lambda: "step 3" in box("logs", run).stdout)
    box("drill", run, "--how", "process")
    assert box.ended(run)["state"] == "succeeded"
    lines = box("logs", run).stdout.splitlines()
    assert any(line.startswith("resumed at step") for line in lines)
    assert sum(line.startswith("step 39 ") for line in lines) == 1


def test_the_readme_tells_the_truth(box: Box) -> None:
    """Every `$ stoker ...` line of the README, in order, in the folder it says."""
    shutil.copytree(EXAMPLES / "digits", box.work, dirs_exist_ok=True)
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    commands = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    assert len(commands) > 8
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "stoker"
        box(*words[1:], code=None if words[1] == "doctor" else 0)


def test_the_readmes_job_file_is_valid() -> None:
    from stoker.spec import parse_job

    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
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
