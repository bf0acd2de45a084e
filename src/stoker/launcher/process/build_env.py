"""Builds the environment of a `setup:` in a process of its own: `build_env.py build|restore DIRECTORY CODE COMMAND`.

    DIRECTORY/env        a virtual environment on top of the Python the training uses
    DIRECTORY/workdir    files that the command made or changed in the working directory
    DIRECTORY/.complete  written last; without it the directory does not count

The new environment sees every package of its parent environment, even if that is a virtual environment itself. Packages are
installed only into the new one: the user's own environment is never changed. Standard library only; it is run by its path,
outside the package.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from typing import Any, Dict, List, Mapping, Tuple

COMPLETE = ".complete"
WORKDIR = "workdir"
ENV = "env"

_QUESTIONS = (
    "import sys, sysconfig, json, importlib.util as u;"
    "print(json.dumps([sys.prefix != sys.base_prefix, [sysconfig.get_paths()[k] for k in ('purelib', 'platlib')],"
    " sysconfig.get_paths()['scripts'], sys.executable, u.find_spec('pip') is not None]))"
)


def activated(directory: str, env: Mapping[str, str]) -> Dict[str, str]:
    """`env` with the built environment activated, as by `source env/bin/activate`."""
    root = os.path.join(directory, ENV)
    result = dict(env)
    if not os.path.isdir(os.path.join(root, "bin")):
        return result
    result["PATH"] = os.pathsep.join(part for part in (os.path.join(root, "bin"), env.get("PATH")) if part)
    result["VIRTUAL_ENV"] = root
    result.pop("PYTHONHOME", None)
    return result


def main(argv: List[str]) -> int:
    action, directory, code, command = argv
    if action == "restore":
        _copy_tree(os.path.join(directory, WORKDIR), code)
        return 0
    shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(directory)
    code_before = _snapshot(code)
    env = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", **os.environ}
    failed = _make(directory, env)
    if failed:
        return failed
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=code, env=activated(directory, env), close_fds=False
    )
    if done.returncode:
        return 128 - done.returncode if done.returncode < 0 else done.returncode
    _save_changes(code, code_before, os.path.join(directory, WORKDIR))
    _finish(directory)
    return 0


def _make(directory: str, env: Mapping[str, str]) -> int:
    """Make the virtual environment, if the training has a Python on its PATH; an exit code."""
    python = shutil.which("python", path=env.get("PATH")) or shutil.which("python3", path=env.get("PATH"))
    if python is None:
        return 0
    root = os.path.join(directory, ENV)
    command = [python, "-I", "-m", "venv", "--without-pip", "--system-site-packages", root]
    if subprocess.run(command, env=env, close_fds=False).returncode:
        print(f"setup: {python} cannot make a virtual environment", file=sys.stderr)
        return 1
    nested, libraries, scripts, executable, _ = _query(python, env)
    inner = os.path.join(root, "bin", "python")
    if nested:
        _add_parent_packages(_query(inner, env)[1][0], libraries)
        _copy_scripts(scripts, executable, root, inner)
    if not _query(inner, env)[4]:
        command = [inner, "-I", "-m", "ensurepip"]
        if subprocess.run(command, env=env, stdout=subprocess.DEVNULL, close_fds=False).returncode:
            print(f"setup: {python} has no pip and cannot install it; going on without it", file=sys.stderr)
    for name in ("pip", "pip3"):
        _write_script(os.path.join(root, "bin", name), f'#!/bin/sh\nexec "{inner}" -m pip "$@"\n')
    return 0


def _query(python: str, env: Mapping[str, str]) -> List[Any]:
    """Whether it is a virtual environment, its libraries, its scripts, its executable, whether it has pip."""
    command = [python, "-I", "-c", _QUESTIONS]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, close_fds=False, check=True)
    answers: List[Any] = json.loads(done.stdout)
    return answers


def _add_parent_packages(own: str, libraries: List[str]) -> None:
    """Add a path file with the parent's libraries: `--system-site-packages` adds only those of the base Python."""
    lines = [f"import site; site.addsitedir({path!r})" for path in dict.fromkeys(libraries)]
    with open(os.path.join(own, "_parent_environment.pth"), "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def _copy_scripts(scripts: str, executable: str, root: str, inner: str) -> None:
    """Copy the commands of the parent environment (`torchrun`, `accelerate`). Their first line names the parent's Python, which
    does not see the packages that the setup installs."""
    parent = os.path.dirname(executable).encode()
    for name in os.listdir(scripts):
        source, target = os.path.join(scripts, name), os.path.join(root, "bin", name)
        if os.path.lexists(target) or not os.path.isfile(source) or os.path.getsize(source) > 1 << 16:
            continue
        try:
            with open(source, "rb") as file:
                first, rest = file.readline(), file.read()
        except OSError:
            continue
        if first.startswith(b"#!" + parent + b"/python"):
            _write_script(target, f"#!{inner}\n".encode() + rest)


def _write_script(path: str, text: "str | bytes") -> None:
    with open(path, "wb") as file:
        file.write(text.encode() if isinstance(text, str) else text)
    os.chmod(path, 0o755)


_Snapshot = Dict[str, Tuple[int, int, int, int]]


def _snapshot(root: str) -> _Snapshot:
    found: _Snapshot = {}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = os.path.join(folder, name)
            info = os.lstat(path)
            relative = os.path.relpath(path, root)
            if stat.S_ISDIR(info.st_mode):
                found[relative] = (0, 0, 0, stat.S_IFMT(info.st_mode))
            else:
                found[relative] = (info.st_size, info.st_mtime_ns, info.st_ino, info.st_mode)
    return found


def _save_changes(code: str, before: _Snapshot, target: str) -> None:
    os.makedirs(target)
    for relative, seen in _snapshot(code).items():
        if before.get(relative) != seen:
            _copy(os.path.join(code, relative), os.path.join(target, relative))


def _copy_tree(source: str, target: str) -> None:
    for folder, folders, files in os.walk(source):
        for name in folders + files:
            path = os.path.join(folder, name)
            _copy(path, os.path.join(target, os.path.relpath(path, source)))


def _copy(source: str, target: str) -> None:
    mode = os.lstat(source).st_mode
    if stat.S_ISDIR(mode):
        os.makedirs(target, exist_ok=True)
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if stat.S_ISLNK(mode):
        if os.path.lexists(target):
            os.unlink(target)
        os.symlink(os.readlink(source), target)
    elif stat.S_ISREG(mode):
        if os.path.lexists(target):
            os.unlink(target)
        shutil.copy2(source, target)


def _finish(directory: str) -> None:
    """Sync everything before the mark is written: a power cut must not leave the mark on an incomplete environment."""
    os.sync()
    marker = os.path.join(directory, COMPLETE)
    fd = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.fsync(fd)
    os.close(fd)
    parent = os.open(directory, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
