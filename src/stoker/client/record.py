"""What runs, as far as the submitting side knows: git, Python, host, environment.

It asks git with at most two processes, by argv, without hooks, pager, external diff or text conversion, and without
git's environment variables. The server finds out the packages: that takes a second, which a submit should not wait.
"""

from __future__ import annotations

import os
import re
import selectors
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

MAX_DIFF = 1 << 20
GIT_TIMEOUT = 10.0
"""Seconds. A repository on a dead network disk must not block a submit."""

_PASSED = frozenset(
    [
        "PATH",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "LANG",
        "LANGUAGE",
        "TZ",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "PYTHONPATH",
        "CUDA_HOME",
    ]
)
_PASSED_PREFIXES = ("CONDA_", "LC_")
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|PWD|CREDENTIAL|AUTH|(^|_)(KEY|PASS)(_|$)", re.IGNORECASE)


def record(workdir: Path, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The `record` of a submission."""
    environ = os.environ if environ is None else environ
    return {
        "git": git(workdir),
        "executable": _python(environ),
        "host": os.uname().nodename,
        "workdir": str(workdir),
        "environment": environment(environ),
    }


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a job gets from the submitting shell: paths and locale, never secrets."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name in _PASSED or name.startswith(_PASSED_PREFIXES)) and not looks_secret(name)
    }


def looks_secret(name: str) -> bool:
    """Whether the name of a variable suggests a secret value."""
    return _SECRET.search(name) is not None


def git(workdir: Path) -> dict[str, Any] | None:
    """Commit, whether tracked files differ from it, and how (at most 1 MiB). None outside a repository."""
    if not any((directory / ".git").exists() for directory in (workdir, *workdir.parents)):
        return None
    status = _run_git(
        workdir, "status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=dirty"
    )
    if status is None:
        return None
    lines = status[0].decode(errors="replace").splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid")), None)
    branch = next((line.split(None, 2)[-1] for line in lines if line.startswith("# branch.head")), None)
    dirty = any(not line.startswith("#") for line in lines)
    if commit in (None, "(initial)"):
        return {"commit": None, "branch": branch, "dirty": dirty, "diff": None}
    found: dict[str, Any] = {"commit": commit, "branch": branch, "dirty": dirty, "diff": None}
    if dirty:
        diff = _run_git(
            workdir,
            "diff",
            "--no-ext-diff",
            "--no-textconv",
            "--no-color",
            "--ignore-submodules=dirty",
            "HEAD",
        )
        if diff is not None:
            found["diff"] = diff[0].decode(errors="replace")
            found["truncated"] = diff[1]
    return found


def _run_git(workdir: Path, *arguments: str) -> tuple[bytes, bool] | None:
    """The output of git, up to MAX_DIFF, and whether there was more. None when git fails or takes too long."""
    import subprocess  # lazy: not needed outside a repository

    argv = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "--no-pager", *arguments]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        process = subprocess.Popen(
            argv,
            cwd=workdir,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        # git is not installed: nothing is recorded about it.
        return None
    with process:
        return _collect(process)


def _collect(process: subprocess.Popen[bytes]) -> tuple[bytes, bool] | None:
    stdout: IO[bytes] | None = process.stdout
    if stdout is None:
        return None
    deadline = time.monotonic() + GIT_TIMEOUT
    data = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(stdout, selectors.EVENT_READ)
        while len(data) <= MAX_DIFF:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                process.kill()
                return None
            piece = os.read(stdout.fileno(), 1 << 16)
            if not piece:
                return (bytes(data), False) if process.wait() == 0 else None
            data += piece
    process.kill()
    return bytes(data[:MAX_DIFF]), True


def _python(environ: Mapping[str, str]) -> str:
    """The Python that `python` in a job means. Starts no process."""
    for directory in environ.get("PATH", "").split(os.pathsep):
        for name in ("python", "python3"):
            candidate = Path(directory) / name
            if directory and os.access(candidate, os.X_OK) and candidate.is_file():
                return str(candidate)
    return sys.executable
