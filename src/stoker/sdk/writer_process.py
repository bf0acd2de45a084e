"""Writing what was copied aside: a process of its own beside the training, which knows nothing of torch.

It shares a piece of memory with the training and nothing else: no interpreter lock, so the training's Python code
does not wait for it; not the fate, so a training that is told to end (SIGTERM) may end while its last checkpoint
is still being written. One request per line on stdin, one answer per line on stdout; it ends when stdin does.
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
"""Beside a training that wants every CPU, about 3% of one; at the lowest there is (19) it would take minutes."""


def main() -> None:
    """`argv`: where the package is, the descriptor of the memory."""
    # What was begun is finished; the grace period has its own end. Its parent has blocked them until here.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _give_way()
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
    """Do it, and say how it went. Whatever goes wrong is told: the training raises it."""
    said: Dict[str, Any] = {"path": None}
    try:
        with memoryview(memory) as view:
            said["path"] = perform(request, view)
    except Exception as exc:  # noqa: BLE001 - told to the training, whatever it is
        said["error"] = str(exc) or type(exc).__name__
        said["errno"] = exc.errno if isinstance(exc, OSError) else None
    return json.dumps(said).encode() + b"\n"


def perform(request: Mapping[str, Any], memory: memoryview) -> Optional[str]:
    """Write one checkpoint; its path, or None when others still have to write their parts of it."""
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
    """Several processes write one directory. Each file gets its name when it is on the disk; whoever finds all of
    them there and takes the directory first, puts it in its place."""
    name, expected = request["name"], request["part_of"]["files"]
    directory = str(checkpoint.directory())
    workshop = os.path.join(directory, f".{name[:100]}.{request['part_of']['token']}.tmp")
    common = os.path.join(workshop, "parts")
    os.makedirs(common, exist_ok=True)
    for path, items in files.items():
        _write(os.path.join(common, f"{path}.part"), items, memory)
        sync(os.path.join(common, f"{path}.part"))
        os.replace(os.path.join(common, f"{path}.part"), os.path.join(common, path))
    if not all(os.path.exists(os.path.join(common, path)) for path in expected):
        return None
    whole = os.path.join(workshop, name)
    try:
        os.rename(common, whole)
    except FileNotFoundError:
        return None  # Another one found all of them there too, and was first.
    target = os.path.join(directory, name)
    try:
        formats.sync_directory(whole)
        swap(whole, target)
        checkpoint.announce(name, request["step"], request["metrics"])
        formats.sync_directory(directory)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    if request["keep"] is not None:
        checkpoint.prune(name, request["keep"])
    return target


def _write(path: str, items: Sequence[Any], memory: memoryview) -> None:
    """A file is a row of items: stretches of the memory as they are, and archives."""
    with open(path, "wb", buffering=0) as file:
        writer = direct_io.Writer(file.fileno(), sum(describe(items)))
        for kind, what in items:
            if kind == "zip":
                archive.write(writer, [(name, offset, size) for name, offset, size in what], memory)
            else:
                archive.copy(writer, memory, *what)
        writer.finish()


def _give_way() -> None:
    """The training goes first: in CPU time, and where the kernel knows how, in disk time."""
    try:
        os.nice(NICE)
        number = {"x86_64": 251, "aarch64": 30}.get(platform.machine())
        if sys.platform == "linux" and number is not None:
            # ioprio_set(IOPRIO_WHO_PROCESS, this process, best effort class, lowest level)
            ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, (2 << 13) | 7)
    except OSError:
        pass  # Not allowed: then it competes as any other process does.


def describe(items: Sequence[Any]) -> List[Any]:
    """Sizes of the items of a file, one after the other."""
    return [archive.size(what) if kind == "zip" else what[1] for kind, what in items]
