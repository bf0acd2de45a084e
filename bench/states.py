"""Saving a torch state in every way: run by path in the environment that has torch.

states.py stall BYTES ROUNDS DIRECTORY     how long each call stops the training; JSON on stdout
states.py train BYTES THREADS DIRECTORY    a training that saves once, begins when there is a file `begin` in DIRECTORY,
                                           saves when told to (a file `go-N`), and records every step in `steps.csv`;
                                           ends when there is a file `stop`
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import random
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import stoker

BLOCKS = 32
OURS, TORCH, DCP, DCP_ASYNC, DCP_KEPT, MEMCPY, DISK = (
    "ours", "torch.save", "dcp.save", "dcp.async_save", "dcp.async_save, stager kept", "memcpy", "disk",
)  # fmt: skip


def state(size: int) -> dict[str, Any]:
    """Parameters and two moments of each, as Adam keeps them, of `size` bytes in all."""
    width = size // 4 // 3 // BLOCKS // 4

    def tensors() -> dict[str, torch.Tensor]:
        return {
            f"block.{block}.{part}": torch.rand(width)
            for block in range(BLOCKS)
            for part in ("qkv", "out", "up", "down")
        }

    return {"model": tensors(), "first": tensors(), "second": tensors(), "step": 1}


def stall(size: int, rounds: int, where: Path) -> dict[str, Any]:
    """Milliseconds of each call by round, and until it is on the disk if the call returns earlier."""
    values = state(size)
    with contenders(values, where) as found:
        return {**measure(found, rounds, where), "bytes": size_of(values), "torch": torch.__version__}


@contextlib.contextmanager
def contenders(values: dict[str, Any], where: Path) -> Iterator[dict[str, Callable[[], Any]]]:
    """Each saves the state and may return a function that waits until it is on the disk."""
    os.environ["STOKER_CHECKPOINT_DIR"] = str(where / "ours")
    os.environ.pop("STOKER_TASK_DIR", None)
    dist.init_process_group("gloo", init_method=f"file://{where}/meet", rank=0, world_size=1)
    tensors = tensors_of(values, [])
    gpu = any(value.is_cuda for value in tensors)
    copies = [torch.empty_like(value, device="cpu", pin_memory=gpu) for value in tensors]
    kept = DefaultStager(StagingOptions(gpu, True, False, gpu))
    target = str(where / "theirs")

    def memcpy() -> None:
        if not gpu:
            copy_all(copies, tensors)
            return
        for copy, value in zip(copies, tensors, strict=True):
            copy.copy_(value, non_blocking=True)
        torch.cuda.synchronize()

    def ours() -> Callable[[], None]:
        stoker.checkpoint.save_torch(values, "last.pt", asynchronous=True)
        return stoker.checkpoint.wait

    def disk() -> None:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for copy in copies:
            os.write(fd, (ctypes.c_char * copy.nbytes).from_address(copy.data_ptr()))
        os.fsync(fd)
        os.close(fd)

    memcpy()
    yield {
        MEMCPY: memcpy,
        OURS: ours,
        TORCH: lambda: torch.save(values, target),
        DCP: lambda: dcp.save(values, checkpoint_id=target) and None,
        DCP_ASYNC: lambda: in_background(values, target),
        DCP_KEPT: lambda: in_background(values, target, kept),
        DISK: disk,
    }
    stoker.checkpoint.wait()
    kept.close()
    dist.destroy_process_group()
    for path in (target, str(where / "ours")):
        clear(path)


def copy_all(copies: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    for copy, value in zip(copies, tensors, strict=True):
        ctypes.memmove(copy.data_ptr(), value.data_ptr(), value.nbytes)


def in_background(values: dict[str, Any], target: str, stager: Any = None) -> Callable[[], None]:
    """A save that DCP calls asynchronous; calling the result waits until it is on the disk."""
    future = dcp.async_save(values, checkpoint_id=target, async_stager=stager)
    upload = getattr(future, "upload_completion", future)
    return lambda: upload.result() and None


def measure(
    found: dict[str, Callable[[], Any]],
    rounds: int,
    where: Path,
    deadline: float = math.inf,
    ready: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """All of them in turns, in a changing order, with `ready` before each. Failed ones are reported."""
    calls: dict[str, list[float]] = {name: [] for name in found}
    ends: dict[str, list[float]] = {name: [] for name in found}
    first: dict[str, float] = {}
    failed: dict[str, str] = {}
    order = random.Random(7)
    for number in range(rounds + 1):
        turn = list(found)
        order.shuffle(turn)
        for name in turn:
            if name in failed or (number > 1 and time.time() > deadline):
                continue
            clear(str(where / "theirs"))
            os.sync()
            ready()
            try:
                called, ended = _time(found[name])
            except Exception as exc:  # a peer that does not work here must not lose the figures of the others
                failed[name] = f"{type(exc).__name__}: {exc}"[:300]
                say(f"    {name}: {failed[name]}")
                continue
            # The first round allocates memory and imports code: reported separately.
            if number == 0:
                first[name] = called
            else:
                calls[name].append(called)
                ends[name].append(ended)
            say(f"    {name}: {called:.0f} ms, on its way to the disk for {ended:.0f} ms")
    return {"calls": calls, "ends": ends, "first": first, "failed": failed}


def _time(contender: Callable[[], Any]) -> tuple[float, float]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    rest = contender()
    called = time.perf_counter() - begin
    if rest is not None:
        rest()
    return called * 1000, (time.perf_counter() - begin) * 1000


def size_of(values: Any) -> int:
    return sum(value.numel() * value.element_size() for value in tensors_of(values, []))


def tensors_of(value: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            tensors_of(part, found)
    return found


class Work:
    """Equal steps: some milliseconds of matrix products and an update in place."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._x, self._weight = torch.rand(384, 384), torch.rand(384, 384)
        self._moving = tensors_of(values, [])[0][:100_000]

    def step(self) -> None:
        for _ in range(8):
            self._x = torch.tanh(self._x @ self._weight * 0.01)
        self._moving.mul_(0.999)


def train(size: int, threads: int, where: Path) -> None:
    torch.set_num_threads(threads)
    values = state(size)
    work = Work(values)
    stoker.checkpoint.save_torch(values, "step-0.pt", step=0, asynchronous=True)
    stoker.checkpoint.wait()
    while not (where / "begin").exists():
        time.sleep(0.05)
    saves = 0
    with (where / "steps.csv").open("w", buffering=1 << 16) as log:
        print("ready", flush=True)
        while not (where / "stop").exists():
            begin = time.time()
            work.step()
            log.write(f"{begin:.6f},{time.time():.6f}\n")
            if (where / f"go-{saves + 1}").exists():
                saves += 1
                begin = time.time()
                stoker.checkpoint.save_torch(
                    values, f"step-{saves}.pt", step=saves, keep=1, asynchronous=True
                )
                note_save(where, saves, begin)


def note_save(where: Path, number: int, begin: float) -> None:
    """Record the times of the call and of its return."""
    (where / f"saved-{number}.tmp").write_text(json.dumps([begin, time.time()]))
    (where / f"saved-{number}.tmp").rename(where / f"saved-{number}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def clear(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    Path(path).unlink(missing_ok=True) if Path(path).is_file() else None


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] == "stall":
        print(json.dumps(stall(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))))
    else:
        train(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
