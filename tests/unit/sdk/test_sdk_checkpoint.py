"""stoker.checkpoint in a training script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import stoker


def commits(task: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (task / "sdk" / "commits.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def write_both(path: str) -> None:
    os.mkdir(path)
    Path(path, "weights.bin").write_bytes(b"w")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"bytes", {"": b"bytes"}),
        (bytearray(b"bytes"), {"": b"bytes"}),
        (memoryview(b"bytes"), {"": b"bytes"}),
        ("text ü", {"": "text ü".encode()}),
        ({"a.bin": b"1", "deep/b.txt": "2"}, {"a.bin": b"1", "deep/b.txt": b"2"}),
        (lambda path: Path(path).write_bytes(b"written"), {"": b"written"}),
        (write_both, {"weights.bin": b"w"}),
    ],
    ids=["bytes", "bytearray", "memoryview", "text", "dict", "function-file", "function-directory"],
)
def test_saving(data: Any, expected: dict[str, bytes], there: Path, task: Path) -> None:
    path = stoker.checkpoint.save("step-7", data, step=7, metrics={"loss": 0.5, "bad": None})
    assert path == str(there / "step-7")
    found = there / "step-7"
    files = [found] if found.is_file() else [file for file in found.rglob("*") if file.is_file()]
    assert {
        "" if file == found else str(file.relative_to(found)): file.read_bytes() for file in files
    } == expected
    assert os.listdir(there) == ["step-7"]
    assert commits(task) == [{"name": "step-7", "step": 7, "generation": 2, "metrics": {"loss": 0.5}}]


def test_saving_a_copy_of_a_file_or_directory(there: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_bytes(b"1")
    stoker.checkpoint.save("tree", source)
    stoker.checkpoint.save("file", source / "a")
    (source / "a").write_bytes(b"2")
    assert (there / "tree" / "a").read_bytes() == (there / "file").read_bytes() == b"1"


def test_a_function_gets_a_path_with_the_extension(there: Path) -> None:
    seen = []
    stoker.checkpoint.save("model.keras", lambda path: (seen.append(path), Path(path).write_bytes(b"k")))
    assert seen[0].endswith("/model.keras")


@pytest.mark.parametrize("first", [b"file", {"old": b"1"}])
@pytest.mark.parametrize("second", [b"other", {"new": b"2"}])
def test_replacing_an_existing_checkpoint(first: Any, second: Any, there: Path) -> None:
    stoker.checkpoint.save("last", first)
    stoker.checkpoint.save("last", second)
    assert os.listdir(there) == ["last"]
    if isinstance(second, dict):
        assert os.listdir(there / "last") == ["new"]
    else:
        assert (there / "last").read_bytes() == second


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden", "x.tmp", "a\0b"])
def test_invalid_checkpoint_names_are_refused(name: str, there: Path) -> None:
    with pytest.raises(ValueError, match="not a name for a checkpoint"):
        stoker.checkpoint.save(name, b"1")
    assert not there.exists()


def test_a_failed_save_leaves_the_old_one(there: Path, task: Path) -> None:
    def fail(path: str) -> None:
        Path(path).write_bytes(b"half")
        raise RuntimeError("out of memory")

    stoker.checkpoint.save("last", b"good")
    for broken in (fail, lambda path: None, 7, {"../out": b"1"}):
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            stoker.checkpoint.save("last", broken)  # type: ignore[arg-type]
    assert stoker.checkpoint.load("last") == b"good"
    assert os.listdir(there) == ["last"]
    assert len(commits(task)) == 1


def test_killed_while_saving(there: Path) -> None:
    """At any moment the checkpoint is the complete old one or the complete new one."""
    code = """
import os, signal, sys, stoker
from stoker.sdk import atomic
stoker.checkpoint.save("last", b"old" * 1000)
real = {"fsync": os.fsync, "replace": os.replace, "write": os.write}
left = int(sys.argv[1])
def dying(name):
    def call(*args, **rest):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
        return real[name](*args, **rest)
    return call
for name in real:
    setattr(os, name, dying(name))
stoker.checkpoint.save("last", b"new" * 1000)
"""
    seen = set()
    for moment in range(6):
        done = subprocess.run([sys.executable, "-c", code, str(moment)])
        assert done.returncode in (0, -signal.SIGKILL)
        data = (there / "last").read_bytes()
        assert data in (b"old" * 1000, b"new" * 1000)
        seen.add((done.returncode, data[:3]))
    assert {(-9, b"old"), (0, b"new")} <= seen


def test_the_checkpoint_to_resume_from(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stoker.checkpoint.latest() is None
    assert stoker.checkpoint.load() is None
    there.mkdir(parents=True)
    for time, name in enumerate(["step-2", "step-1", "unfinished.tmp", ".hidden", "checkpoint"]):
        (there / name).write_text(name, encoding="utf-8")
        os.utime(there / name, (time, time))
    assert stoker.checkpoint.latest() == there / "step-1"
    monkeypatch.setenv("STOKER_RESUME_FROM", str(there / "step-2"))
    assert stoker.checkpoint.load() == b"step-2"
    stoker.checkpoint.save("step-3", {"a": b"1"})
    assert stoker.checkpoint.load() == there / "step-3"
    (there / "latest").mkdir()
    os.utime(there / "latest", (2**31, 2**31))
    assert stoker.checkpoint.latest() == there / "latest"


def test_the_stem_of_a_tensorflow_checkpoint(there: Path) -> None:
    there.mkdir(parents=True)
    for name in ("ckpt-3.data-00000-of-00001", "ckpt-3.index"):
        (there / name).write_bytes(b"1")
    assert stoker.checkpoint.latest() == there / "ckpt-3"


def test_keep_deletes_only_older_ones_of_the_same_kind(there: Path) -> None:
    stoker.checkpoint.save("best.pt", b"1")
    for step in (9, 10, 11, 12):
        stoker.checkpoint.save(f"step-{step}", {"a": b"1"}, step=step, keep=2)
    assert sorted(os.listdir(there)) == ["best.pt", "step-11", "step-12"]
    with pytest.raises(ValueError, match="at least one"):
        stoker.checkpoint.save("x", b"1", keep=0)


def test_stoker_not_writable_still_saves(task: Path, there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (task / "sdk").write_text("in the way", encoding="utf-8")
    stoker.checkpoint.save("last", b"1")
    assert (there / "last").read_bytes() == b"1"
    assert "cannot be noted" in capsys.readouterr().err


def test_outside_stoker(tmp_path: Path, task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STOKER_TASK_DIR", "STOKER_CHECKPOINT_DIR"):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    assert stoker.checkpoint.save("last", b"1") == "checkpoints/last"
    assert stoker.checkpoint.load() == b"1"
    assert sorted(os.listdir(tmp_path)) == ["checkpoints"]


def test_torch_states_without_importing_torch_before(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real torch where it is installed, else with a fake that saves in the same way."""
    try:
        import torch
    except ImportError:
        torch = types.SimpleNamespace(  # type: ignore[assignment]
            save=lambda state, path: Path(path).write_text(json.dumps(state), encoding="utf-8"),
            load=lambda file, map_location, weights_only: json.load(file),
        )
        monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    assert stoker.checkpoint.load_torch() is None
    assert stoker.checkpoint.save_torch({"epoch": 3}, step=3).endswith("/step-3.pt")
    assert stoker.checkpoint.save_torch({"epoch": 4}).endswith("/last.pt")
    assert stoker.checkpoint.load_torch() == {"epoch": 4}
    assert stoker.checkpoint.load_torch("step-3.pt") == {"epoch": 3}


def test_importing_stoker_imports_nothing_else() -> None:
    code = "import sys, stoker; stoker.report, stoker.checkpoint; print(*sorted(m.split('.')[0] for m in sys.modules))"
    loaded = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert not loaded & {"numpy", "torch", "pydantic", "click", "asyncio", "sqlalchemy"}
