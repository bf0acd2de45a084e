"""Saving a torch state that two ranks have, whole (DDP) or in parts (FSDP). Run by path in the environment
that has torch, once for each rank, with torchrun's variables in the environment.

    state_ranks.py stall KIND BYTES ROUNDS DIRECTORY    how long each call stops both; the first rank prints JSON
    state_ranks.py train KIND BYTES DIRECTORY           as `states.py train`, on one thread each and in step with each other

KIND is ddp (every rank has all of it, the first one saves) or fsdp (each has its part and saves that).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import states
import stoker

SAVE, STOP = 1.0, 100.0
"""Commands of the first rank to the others, sent with each step."""


def state(kind: str, size: int) -> dict[str, Any]:
    """`states.state`; of the parts of FSDP both ranks together have `size` bytes."""
    if kind == "ddp":
        return states.state(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values: dict[str, Any] = states.state(size // dist.get_world_size())
    for group in ("model", "first", "second"):
        values[group] = {
            name: DTensor.from_local(value, mesh, [Shard(0)], run_check=False)
            for name, value in values[group].items()
        }
    return values


def local(values: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors in this rank's memory."""
    found = states.tensors_of(values, [])
    return [value.to_local() if isinstance(value, DTensor) else value for value in found]


def stall(kind: str, size: int, rounds: int, where: Path) -> dict[str, Any]:
    """As `states.stall`. Each figure is that of the slower rank: the other waits in the next step."""
    values = state(kind, size)
    with contenders(kind, values, where) as found:
        mine = states.measure(found, rounds, where, ready=dist.barrier)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    longest = {
        what: {
            name: [max(both) for both in zip(*(one[what][name] for one in everyones), strict=True)]
            for name in mine[what]
        }
        for what in ("calls", "ends")
    }
    first = {name: max(one["first"][name] for one in everyones) for name in mine["first"]}
    failed = {name: text for one in everyones for name, text in one["failed"].items()}
    return {**longest, "first": first, "failed": failed}


@contextlib.contextmanager
def contenders(kind: str, values: dict[str, Any], where: Path) -> Iterator[dict[str, Callable[[], Any]]]:
    rank = dist.get_rank()
    os.environ["STOKER_CHECKPOINT_DIR"] = str(where / "ours")
    os.environ.pop("STOKER_TASK_DIR", None)
    writes = kind == "fsdp" or rank == 0
    sources = local(values) if writes else []
    copies = [torch.empty_like(value) for value in sources]
    target = str(where / "theirs")

    def ours() -> Callable[[], None] | None:
        if not writes:
            return None
        save(kind, values, "last")
        return stoker.checkpoint.wait

    def plain() -> None:
        if writes:
            torch.save(values if kind == "ddp" else sources, f"{target}-{rank}")

    states.copy_all(copies, sources)
    yield {
        states.MEMCPY: lambda: states.copy_all(copies, sources),
        states.OURS: ours,
        states.TORCH: plain,
        states.DCP: lambda: dcp.save(values, checkpoint_id=target) and None,
        states.DCP_ASYNC: lambda: states.in_background(values, target),
    }
    stoker.checkpoint.wait()
    dist.barrier()
    for path in (target, f"{target}-{rank}", str(where / "ours")):
        states.clear(path)


def save(kind: str, values: dict[str, Any], name: str, **more: Any) -> None:
    if kind == "ddp":
        stoker.checkpoint.save_torch(values, name, asynchronous=True, **more)
    else:
        stoker.checkpoint.save_sharded(values, name, asynchronous=True, **more)


def train(kind: str, size: int, where: Path) -> None:
    rank = dist.get_rank()
    values = state(kind, size)
    work = states.Work({"moving": local(values)[0]})
    writes = kind == "fsdp" or rank == 0
    if writes:
        save(kind, values, "step-0", step=0)
        stoker.checkpoint.wait()
    while not (where / "begin").exists():
        time.sleep(0.05)
    dist.barrier()
    saves, said = 0, torch.zeros(1)
    with (where / f"steps-{rank}.csv").open("w", buffering=1 << 16) as log:
        while True:
            begin = time.time()
            work.step()
            said[0] = told(where, saves) if rank == 0 else 0.0
            dist.all_reduce(said)
            log.write(f"{begin:.6f},{time.time():.6f}\n")
            if said[0] >= STOP:
                return
            if said[0] >= SAVE:
                saves += 1
                begin = time.time()
                if writes:
                    save(kind, values, f"step-{saves}", step=saves, keep=1)
                if rank == 0:
                    states.note_save(where, saves, begin)


def told(where: Path, saves: int) -> float:
    if (where / "stop").exists():
        return STOP
    return SAVE if (where / f"go-{saves + 1}").exists() else 0.0


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if sys.argv[1] == "stall":
        found = stall(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
        if dist.get_rank() == 0:
            print(json.dumps(found))
    else:
        train(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
