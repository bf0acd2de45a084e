"""The process that writes a copied state. It does not import torch.

It shares only a memory file with the training. It does not take the training's interpreter lock, and it completes a
checkpoint that the training has copied before it ended (SIGTERM). One request per line on stdin, one answer per line on
stdout; it ends at the end of stdin.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import shutil
import signal
import sys
from typing import Any, Dict, List, Mapping, Optional, Sequence

from stoker.linux import direct_io
from stoker.sdk import archive, checkpoint, run_info
from stoker.sdk.atomic import swap, sync
from stoker.task import formats

NICE = 15
"""It gets about 3% of a CPU beside a training that uses every CPU. With the lowest priority (19) a save takes minutes."""


def main() -> None:
    """`argv`: the directory of the package, the descriptor of the memory."""
    # A save in progress is completed; the grace period limits it. The parent has blocked these signals until here.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _lower_priority()
    fd = int(sys.argv[2])
    memory: Optional[mmap.mmap] = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if memory is None or len(memory) < request["memory"]:
            memory = mmap.mmap(fd, request["memory"], prot=mmap.PROT_READ)
        for name in run_info.IDENTITY:
            os.environ.pop(name, None)
        os.environ.update(request["env"])
        os.write(1, answer(request, memory))


def answer(request: Mapping[str, Any], memory: mmap.mmap) -> bytes:
    """Perform a request; the result as a line of JSON. The training raises the error in it."""
    result: Dict[str, Any] = {"path": None}
    try:
        with memoryview(memory) as view:
            result["path"] = perform(request, view)
    except Exception as exc:  # noqa: BLE001 - reported to the training
        result["error"] = str(exc) or type(exc).__name__
        result["errno"] = exc.errno if isinstance(exc, OSError) else None
    return json.dumps(result).encode() + b"\n"


def perform(request: Mapping[str, Any], memory: memoryview) -> Optional[str]:
    """Write one checkpoint; its path, or None when other processes have not written their parts yet."""
    files: Mapping[str, Sequence[Any]] = request["files"]
    if request.get("part_of"):
        return _write_part(request, files, memory)
    return checkpoint.put(
        request["name"],
        lambda path: _write(path, files[""], memory),
        step=request["step"],
        metrics=request["metrics"],
        keep=request["keep"],
    )


def _write_part(
    request: Mapping[str, Any], files: Mapping[str, Sequence[Any]], memory: memoryview
) -> Optional[str]:
    """Write this process's files of a directory that several processes write. Each file gets its name when it is synced.
    The first process that finds all of them moves the directory to its final name."""
    name, expected = request["name"], request["part_of"]["files"]
    directory = str(checkpoint.directory())
    temporary = os.path.join(directory, f".{name[:100]}.{request['part_of']['token']}.tmp")
    common = os.path.join(temporary, "parts")
    os.makedirs(common, exist_ok=True)
    for path, items in files.items():
        _write(os.path.join(common, f"{path}.part"), items, memory)
        sync(os.path.join(common, f"{path}.part"))
        os.replace(os.path.join(common, f"{path}.part"), os.path.join(common, path))
    if not all(os.path.exists(os.path.join(common, path)) for path in expected):
        return None
    whole = os.path.join(temporary, name)
    try:
        os.rename(common, whole)
    except FileNotFoundError:
        return None  # Another process was first.
    target = os.path.join(directory, name)
    try:
        formats.sync_directory(whole)
        swap(whole, target)
        checkpoint.announce(name, request["step"], request["metrics"])
        formats.sync_directory(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if request["keep"] is not None:
        checkpoint.prune(name, request["keep"])
    return target


def _write(path: str, items: Sequence[Any], memory: memoryview) -> None:
    """Write a file: a sequence of ranges of the memory and of archives."""
    with open(path, "wb", buffering=0) as file:
        writer = direct_io.Writer(file.fileno(), sum(describe(items)))
        for kind, what in items:
            if kind == "zip":
                archive.write(writer, [(name, offset, size) for name, offset, size in what], memory)
            else:
                archive.copy(writer, memory, *what)
        writer.finish()


def _lower_priority() -> None:
    """Lower the priority for CPU time and, where the kernel supports it, for disk time."""
    try:
        os.nice(NICE)
        number = {"x86_64": 251, "aarch64": 30}.get(platform.machine())
        if sys.platform == "linux" and number is not None:
            # ioprio_set(IOPRIO_WHO_PROCESS, this process, best effort class, lowest level)
            ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, (2 << 13) | 7)
    except OSError:
        pass  # Not allowed: then it runs with the normal priority.


def describe(items: Sequence[Any]) -> List[Any]:
    """Sizes of the items of a file, in order."""
    return [archive.size(what) if kind == "zip" else what[1] for kind, what in items]
