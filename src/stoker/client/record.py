"""What runs, as far as the submitting side knows: git, Python, host, environment.

It asks git with at most two processes, by argv, without hooks, pager, external diff or text conversion, and without
git's environment variables. The server finds out the packages: that takes a second, which a submit should not wait.
"""

from __future__ import annotations

import os
import re
import selectors
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

MAX_DIFF = 1 << 20
GIT_TIMEOUT = 10.0
"""Seconds. A repository on a dead network disk must not block a submit."""

_ALWAYS = frozenset(
    [
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "PYTHONPATH",
    ]
)
_ALWAYS_PREFIXES = ("CONDA_",)
"""The shell's Python and what it needs; passed even with `--clean-env`."""
_PASSED = frozenset(["LANG", "LANGUAGE", "TZ", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"])
_PASSED_PREFIXES = ("LC_",)
TRAINING_PREFIXES = (
    "HF_",
    "WANDB_",
    "MLFLOW_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "CUDA_",
    "NCCL_",
    "TORCH_",
    "PYTORCH_",
    "TF_",
    "XLA_",
    "JAX_",
    "TRANSFORMERS_",
    "COMET_",
    "NEPTUNE_",
    "TOKENIZERS_",
)
PROXIES = frozenset(["HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY"])
"""In small letters too."""
NEVER = frozenset(
    [
        "CUDA_VISIBLE_DEVICES",
        "TF_CONFIG",
        "JAX_COORDINATOR_ADDRESS",
        "JAX_NUM_PROCESSES",
        "JAX_PROCESS_ID",
        "JAX_LOCAL_DEVICE_IDS",
    ]
)
"""Stoker itself decides these for each task; the shell's are of something else."""
_TERRAFORM = ("TF_VAR_", "TF_TOKEN_", "TF_CLI_")
"""Of Terraform, which has the prefix of TensorFlow: its tokens and passwords are not for a training."""
_SECRET = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSW|PWD|CREDENTIAL|AUTH|API_?KEY|(^|_)(KEYS?|PASS)(_|$)", re.IGNORECASE
)
_LOGIN_IN_URL = re.compile(r"://[^/\s@]+@")
_LONGEST_SECRET = 65536
"""Characters. The server takes no longer one."""
_SHIMS = "shims"
"""The directory of the programs by which pyenv, asdf, mise and rye choose an interpreter for the current directory."""
_SHIM_TIMEOUT = 10.0


def record(
    workdir: Path, environ: Mapping[str, str] | None = None, *, python: str | None = None, clean: bool = False
) -> dict[str, Any]:
    """The `record` of a submission. `python`: the job's own word for Python. `clean`: see `environment`."""
    environ = os.environ if environ is None else environ
    found = interpreter(environ, python)
    passed = environment(environ, clean=clean)
    shim = python is not None and found is not None and Path(found).parent.name == _SHIMS
    if shim and found is not None and (real := _behind(found, workdir, environ)):
        # A shim chooses by the current directory, and the training has another one. Asking it takes a while, so it is not
        # asked for a command that names no Python.
        found = real
        passed["PATH"] = f"{Path(real).parent}{os.pathsep}{passed.get('PATH', '')}"
    return {
        "git": git(workdir),
        "executable": found,
        "host": os.uname().nodename,
        "workdir": str(workdir),
        "environment": passed,
    }


def environment(environ: Mapping[str, str], *, clean: bool = False) -> dict[str, str]:
    """The variables that a job gets from the submitting shell, never secrets. `clean`: those of its Python alone."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (_always(name) or (not clean and _passed(name))) and not holds_secret(name, value)
    }


def secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for training that look like secrets. They travel as secrets of the run."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if _for_training(name) and holds_secret(name, value) and 0 < len(value) <= _LONGEST_SECRET
    }


def holds_secret(name: str, value: str) -> bool:
    """Whether a variable looks like a secret: by its name, or because its value is an address with a login."""
    return looks_secret(name) or _LOGIN_IN_URL.search(value) is not None


def looks_secret(name: str) -> bool:
    """Whether the name of a variable suggests a secret value."""
    return _SECRET.search(name) is not None


def _always(name: str) -> bool:
    return name in _ALWAYS or name.startswith(_ALWAYS_PREFIXES)


def _passed(name: str) -> bool:
    return name in _PASSED or name.startswith(_PASSED_PREFIXES) or _for_training(name)


def _for_training(name: str) -> bool:
    ours = name.startswith(TRAINING_PREFIXES) and name not in NEVER and not name.startswith(_TERRAFORM)
    return ours or name.upper() in PROXIES


def interpreter(environ: Mapping[str, str], name: str | None = None) -> str | None:
    """The Python that `name` means in a shell, by default `python`, else `python3`. None: it finds none. Starts nothing."""
    if name is not None and "/" in name:
        return name
    folders = [folder for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    for word in ("python", "python3") if name is None else (name,):
        for folder in folders:
            path = f"{folder}/{word}"
            if os.access(path, os.X_OK) and os.path.isfile(path):  # noqa: PTH113
                return path
    return None


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


def _behind(shim: str, workdir: Path, environ: Mapping[str, str]) -> str | None:
    """The interpreter that a shim starts here. None: it starts none, and the run will say why."""
    import subprocess  # lazy: only for shims

    code = "import sys; print(sys.executable)"
    try:
        done = subprocess.run(
            [shim, "-S", "-c", code],
            cwd=workdir,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SHIM_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = os.fsdecode(done.stdout).strip()
    return found if done.returncode == 0 and os.access(found, os.X_OK) else None
