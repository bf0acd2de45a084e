"""The bundle: the same content in three forms, and its commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from stoker.launcher import bundle, task_init
from stoker.task import container_layout, formats, layout

TASK = {"run": "digits-7f3k", "attempt": 1, "task": "worker-0"}
BARE = [sys.executable, "-I", "-S"]


@pytest.fixture
def zipped(tmp_path: Path) -> Path:
    path = tmp_path / "bundle.zip"
    bundle.write_zip(str(path))
    return path


def made_by(program: str, place: Path, tmp_path: Path) -> Path:
    """The files that `init` of a bundle unpacks."""
    (tmp_path / "task.json").write_text('{"run": "r", "attempt": 1, "task": "worker-0"}')
    command = [*BARE, program, "init", str(tmp_path / "task.json"), str(tmp_path / "task"), str(place)]
    subprocess.run(command, check=True, cwd="/", env={})
    return place / bundle.digest()


def content(root: Path) -> dict[str, bytes]:
    found = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def test_a_copy_of_a_copy_is_the_same(zipped: Path, tmp_path: Path) -> None:
    first = Path(bundle.write(str(tmp_path / "first")))
    second = made_by(str(zipped), tmp_path / "second", tmp_path)
    third = made_by(str(second), tmp_path / "third", tmp_path)
    assert first.name == second.name == third.name == bundle.digest()
    assert content(first) == content(second) == content(third)
    assert (tmp_path / "second" / "current").resolve() == second
    with zipfile.ZipFile(zipped) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == content(first)


def test_the_zip_is_the_same_whenever_it_is_made(zipped: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.zip"
    command = [sys.executable, "-m", "stoker.launcher.bundle", "--zip", str(again)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert again.read_bytes() == zipped.read_bytes() == bundle.zip_bytes()
    assert done.stdout.strip() == bundle.digest()
    # It is sent as a ConfigMap, which holds at most one mebibyte.
    assert len(bundle.zip_bytes()) < 400_000


def test_training_code_cannot_import_the_courier(tmp_path: Path) -> None:
    root = Path(bundle.write(str(tmp_path)))
    assert not (root / "stoker" / "courier").exists()
    source = Path(bundle.__file__).parents[1] / "courier"
    modules = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    assert "__main__.py" in modules
    assert modules == {
        str(path.relative_to(root / "more/stoker/courier"))
        for path in (root / "more/stoker/courier").rglob("*.py")
    }


def test_the_courier_is_found_in_the_zip(zipped: Path) -> None:
    done = subprocess.run(
        [*BARE, str(zipped), "courier", "--help"], capture_output=True, text=True, cwd="/", env={}
    )
    assert done.returncode == 0, done.stderr
    assert "--key-dir" in done.stdout


@pytest.mark.parametrize(
    "argv", [[], ["dance"], ["init"], ["launch"], ["launch", "-x"], ["collect", "/tmp", "two"], ["shell"]]
)
def test_wrong_arguments(argv: list[str], zipped: Path) -> None:
    done = subprocess.run([*BARE, str(zipped), *argv], capture_output=True, text=True, cwd="/", env={})
    assert done.returncode == 64 and done.stderr.startswith("usage:")


def test_init_reports_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = tmp_path / "task.json"
    task.write_text('{"run": "r", "attempt": "one", "task": "worker-0"}')
    assert task_init.main(str(task), str(tmp_path / "t"), str(tmp_path / "b")) == task_init.BAD_INPUT
    assert "TaskInfo.attempt cannot be 'one'" in capsys.readouterr().err
    task.write_text('{"run": "r", "attempt": 1, "task": "worker-0"}')
    (tmp_path / "t").write_text("a file")
    assert task_init.main(str(task), str(tmp_path / "t"), str(tmp_path / "b")) == 73
    assert str(tmp_path / "t") in capsys.readouterr().err


def test_init_finishes_an_interrupted_init(tmp_path: Path) -> None:
    """The task is in a mounted Secret, where every file is a link."""
    task, root, place = tmp_path / "order" / "task.json", tmp_path / "task", tmp_path / "bin"
    (tmp_path / "order" / "..2026").mkdir(parents=True)
    (tmp_path / "order" / "..data").symlink_to("..2026")
    task.symlink_to("..data/task.json")
    formats.write_json(str(task.parent / "..data" / "task.json"), {**TASK, "of_a_newer_server": True})
    (place / f"{bundle.digest()}.77.tmp").mkdir(parents=True)
    (place / "current").symlink_to("another")
    (root / layout.LOG).mkdir(parents=True)
    for _ in range(2):
        assert task_init.main(str(task), str(root), str(place)) == 0
        assert (place / "current").resolve() == place / bundle.digest()
        assert (root / layout.TASK).read_bytes() == task.read_bytes()
        assert root.stat().st_mode & 0o777 == 0o700
        assert {entry.name for entry in root.iterdir()} == {*layout.DIRECTORIES, layout.TASK}


def test_init_makes_the_tasks_part_of_a_shared_volume(tmp_path: Path) -> None:
    """Tasks of one run have different users; each can write into the directory that the first one makes."""
    task, volume = tmp_path / "task.json", tmp_path / "volume"
    formats.write_json(str(task), TASK)
    volume.mkdir()
    volume.chmod(0o777)
    for name in ("1.worker-0.1", "1.worker-1.1", "1.worker-0.1"):
        part = volume / "digits-7f3k" / name
        assert task_init.main(str(task), str(tmp_path / "task"), str(tmp_path / "bin"), str(part)) == 0
        assert {entry.name: entry.stat().st_mode & 0o777 for entry in part.iterdir()} == {
            "checkpoints": 0o700,
            "staged": 0o700,
        }
    assert (volume / "digits-7f3k").stat().st_mode & 0o777 == 0o777


def test_the_command_finds_a_python_that_is_new_enough(tmp_path: Path) -> None:
    """Python 2 and scripts named like Python are skipped."""
    for name, text in (
        ("python3", "exit 1"),
        ("python", "exit 2"),
        ("python3.12", f'exec {sys.executable} "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    program = tmp_path / "program.py"
    program.write_text("import sys; print(sys.argv[1:], sys.flags.isolated, sys.flags.no_site)")
    command = container_layout.command(str(program), "launch", "/a b", "$HOME")
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert done.stdout == "['launch', '/a b', '$HOME'] 1 1\n", done.stderr
    named = container_layout.command(str(program), "launch", python=sys.executable)
    assert subprocess.run(named, capture_output=True, text=True).stdout == "['launch'] 1 1\n"


def test_an_early_signal_is_handled(tmp_path: Path, zipped: Path) -> None:
    """The kernel drops signals that the first process of a container does not handle yet, so they are blocked
    until it does."""
    root = tmp_path / "task"
    root.mkdir()
    formats.write_json(str(root / layout.TASK), TASK)

    def told_already() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)

    process = subprocess.Popen([*BARE, str(zipped), "launch", str(root)], preexec_fn=told_already, cwd="/")
    try:
        deadline = time.monotonic() + 30
        while (
            b"told to end" not in (root / layout.JOURNAL).read_bytes()
            if (root / layout.JOURNAL).exists()
            else True
        ):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
