"""What is recorded about the origin of a run, and what is never passed on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from stoker.client import record as record_module
from stoker.client.record import environment, git, interpreter, record, secrets

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


SHELL = {
    "PATH": "/bin", "HOME": "/h", "CONDA_PREFIX": "/c", "VIRTUAL_ENV": "/v", "LD_LIBRARY_PATH": "/l",
    "LC_ALL": "C", "LANG": "C", "TZ": "UTC", "HF_HOME": "/data", "WANDB_PROJECT": "digits", "OMP_NUM_THREADS": "3",
    "NUMEXPR_NUM_THREADS": "2", "CUDA_LAUNCH_BLOCKING": "1", "NCCL_DEBUG": "INFO", "TF_CPP_MIN_LOG_LEVEL": "2",
    "XLA_FLAGS": "--x", "TOKENIZERS_PARALLELISM": "false", "no_proxy": "lab", "HTTPS_PROXY": "http://proxy:3128",
}  # fmt: skip
SECRETS = {
    "HF_TOKEN": "s", "WANDB_API_KEY": "s", "MLFLOW_TRACKING_PASSWORD": "s", "NEPTUNE_API_TOKEN": "s", "COMET_APIKEY": "s",
    "http_proxy": "http://ada:hunter2@proxy:3128", "MLFLOW_TRACKING_URI": "https://token@mlflow.lab",
}  # fmt: skip
LEFT_OUT = {
    "CONDA_TOKEN": "s", "CONDA_API_KEY": "s", "LC_PASSWORD": "s", "AWS_SECRET_ACCESS_KEY": "s", "GITHUB_TOKEN": "s",
    "TERM": "xterm", "STOKER_TOKEN": "s", "SSH_AUTH_SOCK": "s", "DISPLAY": ":0", "RANK": "1", "CUDA_VISIBLE_DEVICES": "0",
    "TF_CONFIG": "{}", "JAX_PROCESS_ID": "1", "TF_VAR_password": "s", "TF_TOKEN_app_terraform_io": "s", "HF_EMPTY_TOKEN": "",
}  # fmt: skip


def test_the_environment_that_is_passed_on() -> None:
    given = {**SHELL, **SECRETS, **LEFT_OUT}
    assert environment(given) == SHELL
    assert secrets(given) == SECRETS


def test_a_clean_environment_has_the_shells_python_and_nothing_else() -> None:
    clean = {"PATH", "HOME", "CONDA_PREFIX", "VIRTUAL_ENV", "LD_LIBRARY_PATH"}
    assert set(environment({**SHELL, **SECRETS, **LEFT_OUT}, clean=True)) == clean


def program(path: Path, text: str = "") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_a_record(tmp_path: Path) -> None:
    python = program(tmp_path / "python")
    found = record(tmp_path, {"PATH": str(tmp_path), "HF_TOKEN": "hunter2"})
    assert found["executable"] == python and found["host"] == os.uname().nodename and found["git"] is None
    assert "hunter2" not in str(found)


def test_the_interpreter_is_the_shells_and_never_the_one_that_runs_stoker(tmp_path: Path) -> None:
    old = program(tmp_path / "a/python3")
    python = program(tmp_path / "b/python")
    (tmp_path / "c/python").mkdir(parents=True)
    path = {"PATH": os.pathsep.join(str(tmp_path / name) for name in "cab")}
    assert interpreter(path) == python, "a shell finds it in a later directory, before any python3"
    assert interpreter(path, "python3") == old
    assert interpreter(path, "/opt/x/bin/python") == "/opt/x/bin/python"
    assert interpreter({"PATH": str(tmp_path / "a")}) == old
    assert interpreter({"PATH": "/nonexistent"}) is None and interpreter({}) is None


def test_a_shim_chooses_where_the_run_is_submitted(tmp_path: Path) -> None:
    """As pyenv's: which version it starts depends on a file in the current directory, which the training does not have."""
    real = program(tmp_path / "versions/3.12/bin/python")
    program(tmp_path / "shims/python", '#!/bin/sh\ncat "$PWD/.python-version"\n')
    work = tmp_path / "work"
    work.mkdir()
    (work / ".python-version").write_text(f"{real}\n")
    shell = {"PATH": f"{tmp_path}/shims:{os.environ['PATH']}"}
    assert record(work, shell)["environment"]["PATH"] == shell["PATH"], (
        "not asked: the command names no Python"
    )
    found = record(work, shell, python="python")
    assert found["executable"] == real
    assert found["environment"]["PATH"] == f"{tmp_path}/versions/3.12/bin:{shell['PATH']}"
    (work / ".python-version").unlink()
    unknown = record(work, shell, python="python")
    assert unknown["environment"]["PATH"] == shell["PATH"], "the run itself says what is wrong"
