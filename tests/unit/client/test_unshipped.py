"""A run that died of a file that is here and was not shipped: what is said."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from stoker.client.tree import scan
from stoker.client.unshipped import explain, missing_path


@pytest.fixture
def work(tmp_path: Path) -> Path:
    for name in ("work/data/train.csv", "work/train.py", "work/.venv/lib", "beside/x.bin", "work/big/a.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "work" / ".gitignore").write_text("/data/\n")
    (tmp_path / "work" / ".stokerignore").write_text("*.bin\n")
    return tmp_path / "work"


def failed(work: Path, path: str, **more: Any) -> dict[str, Any]:
    lines = [
        "Traceback (most recent call last):",
        f"FileNotFoundError: [Errno 2] No such file or directory: {path!r}",
    ]
    return {
        "state": "failed",
        "code": "0" * 64,
        "created_at": time.time() + 60,
        "record": {"host": os.uname().nodename, "workdir": str(work)},
        "job": {},
        "attempts": [{"node": "local", "evidence": {"last_lines": lines}}],
        **more,
    }


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data/x y.csv'", "data/x y.csv"),
        ('FileNotFoundError: [Errno 2] No such file or directory: "it\'s.csv"', "it's.csv"),
        ("FileNotFoundError: [Errno 2] No such file or directory: b'raw'", "raw"),
        ("FileNotFoundError: data/set.npy not found.", "data/set.npy"),
        ("cat: data/train.csv: No such file or directory", "data/train.csv"),
        ("ls: cannot access '/data/x': No such file or directory", "/data/x"),
        ("sh: 1: cannot open /data/x: No such file", None),
        ("KeyError: 'data/train.csv'", None),
        ("ModuleNotFoundError: No module named 'torch'", None),
    ],
)
def test_the_missing_path_is_read_from_the_last_lines(line: str, path: str | None) -> None:
    assert missing_path(["epoch 1", line, ""]) == path


def test_a_file_that_git_ignores(work: Path) -> None:
    text = explain(failed(work, "data/train.csv")) or ""
    assert text.startswith(
        "data/train.csv is here and was not shipped, because .gitignore leaves out data/: "
    )
    assert "`!/data/`" in text and f"file://{work}/data" in text and "\n" not in text
    # The remedy works.
    (work / ".stokerignore").write_text("*.bin\n!/data/\n")
    assert "data/train.csv" in [file.path for file in scan(work, work.parent / "home").tree.files]
    assert explain(failed(work, "data/train.csv")) is None


def test_the_place_of_the_code_stands_for_the_folder(work: Path) -> None:
    text = explain(failed(work, "/home/ada/.stoker/tasks/r/1/worker-0/code/data/train.csv")) or ""
    assert text.startswith("data/train.csv is here")


def test_what_stokerignore_names_and_what_is_never_shipped(work: Path) -> None:
    assert "because .stokerignore leaves out big/a.bin" in (explain(failed(work, "big/a.bin")) or "")
    assert "because .venv never is" in (explain(failed(work, ".venv/lib")) or "")


def test_a_path_outside_the_folder(work: Path) -> None:
    outside = work.parent / "beside" / "x.bin"
    text = explain(failed(work, "../beside/x.bin")) or ""
    assert "outside the working folder" in text and f"its full path, {outside}" in text
    assert explain(failed(work, str(outside))) is None, (
        "a run on this machine sees it: that was not the reason"
    )
    on_cluster = failed(work, str(outside))
    on_cluster["attempts"][0]["node"] = "lab/n0"
    assert f"{outside} is on this machine" in (explain(on_cluster) or "")
    assert "not on lab/n0" in (explain(on_cluster) or "")
    assert "not in the image" in (explain(failed(work, str(outside), job={"image": "x"})) or "")


def test_a_file_that_was_written_later(work: Path) -> None:
    assert explain(failed(work, "train.py")) is None, "it was shipped"
    assert "after the run was submitted" in (explain(failed(work, "train.py", created_at=1.0)) or "")


@pytest.mark.parametrize(
    "change",
    [
        {"state": "succeeded"},
        {"code": None},
        {"record": {"host": "another", "workdir": "/"}},
        {"record": {}},
        {"attempts": []},
        {"attempts": [{"node": "local", "evidence": None}]},
    ],
)
def test_nothing_is_said_where_nothing_is_known(work: Path, change: dict[str, Any]) -> None:
    assert explain({**failed(work, "data/train.csv"), **change}) is None
    assert explain(failed(work, "nowhere/x")) is None
