"""What is recorded about the origin of a run, and what is never passed on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from stoker.client import record as record_module
from stoker.client.record import environment, git, record

QUIET = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "HOME": "/nonexistent",
    "PATH": os.environ["PATH"],
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repo"
    path.mkdir()
    run(path, "init", "-q", "-b", "main")
    (path / "train.py").write_text("one\n")
    run(path, "add", ".")
    run(path, "commit", "-q", "-m", "first")
    return path


def run(path: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=path, env=QUIET, check=True, capture_output=True, text=True
    ).stdout


def test_outside_a_repository(tmp_path: Path) -> None:
    assert git(tmp_path) is None


def test_clean_and_changed(repository: Path) -> None:
    commit = run(repository, "rev-parse", "HEAD").strip()
    assert git(repository) == {"commit": commit, "branch": "main", "dirty": False, "diff": None}
    (repository / "sub").mkdir()
    (repository / "train.py").write_text("two\n")
    found = git(repository / "sub")
    assert found is not None and found["dirty"] and found["commit"] == commit
    assert "-one" in found["diff"] and "+two" in found["diff"] and found["truncated"] is False


def test_a_repository_without_commits(tmp_path: Path) -> None:
    run(tmp_path, "init", "-q")
    found = git(tmp_path)
    assert found is not None and found["commit"] is None


def test_large_diffs_are_truncated(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "MAX_DIFF", 1000)
    (repository / "train.py").write_text("line\n" * 100_000)
    found = git(repository)
    assert found is not None and len(found["diff"]) == 1000 and found["truncated"] is True


def test_nothing_of_the_repository_is_run(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = tmp_path / "ran"
    script = tmp_path / "evil"
    script.write_text(f"#!/bin/sh\ntouch '{proof}'\ncat\n")
    script.chmod(0o755)
    for key in ("core.fsmonitor", "diff.external", "core.pager", "diff.x.textconv", "diff.x.command"):
        run(repository, "config", key, str(script))
    hooks = repository / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("post-index-change", "fsmonitor-watchman"):
        (hooks / name).write_text(script.read_text())
        (hooks / name).chmod(0o755)
    (repository / ".gitattributes").write_text("*.py diff=x\n")
    (repository / "train.py").write_text("two\n")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(script))
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    found = git(repository)
    assert found is not None and "+two" in found["diff"]
    assert not proof.exists()


def test_without_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert git(repository) is None


def test_the_environment_that_is_passed_on() -> None:
    given = {
        "PATH": "/bin", "HOME": "/h", "CONDA_PREFIX": "/c", "LC_ALL": "C", "VIRTUAL_ENV": "/v", "LANG": "C", "TZ": "UTC",
        "CONDA_TOKEN": "s", "CONDA_API_KEY": "s", "LC_PASSWORD": "s", "AWS_SECRET_ACCESS_KEY": "s", "HF_TOKEN": "s",
        "TERM": "xterm", "STOKER_TOKEN": "s", "SSH_AUTH_SOCK": "s", "DISPLAY": ":0",
    }  # fmt: skip
    assert set(environment(given)) == {"PATH", "HOME", "CONDA_PREFIX", "LC_ALL", "VIRTUAL_ENV", "LANG", "TZ"}


def test_a_record(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("")
    python.chmod(0o755)
    found = record(tmp_path, {"PATH": str(tmp_path), "HF_TOKEN": "hunter2"})
    assert (
        found["executable"] == str(python) and found["host"] == os.uname().nodename and found["git"] is None
    )
    assert "hunter2" not in str(found)
