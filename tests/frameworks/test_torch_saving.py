"""stoker.checkpoint with real torch: an asynchronous save equals torch's own save."""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from support.journey import Journey

pytestmark = pytest.mark.timeout(900)
LIMIT = 800
SOURCE = Path(__file__).resolve().parents[2] / "src"


def run(python: str, where: Path, code: str, *words: str, ranks: int = 1) -> str:
    """Run a script with so many ranks; returns the output of the first. The script has its own assertions."""
    path = where / "script.py"
    path.write_text(textwrap.dedent(code), encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if not name.startswith("STOKER_")}
    env.update(PYTHONPATH=str(SOURCE), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", WORLD_SIZE=str(ranks))
    # A rendezvous file needs no port.
    env["INIT"] = f"file://{where}/meet-{os.urandom(4).hex()}"
    processes = []
    for rank in range(ranks):
        with (where / f"out-{rank}").open("w", encoding="utf-8") as out:
            processes.append(
                subprocess.Popen(
                    [python, str(path), *words],
                    cwd=where,
                    env={**env, "RANK": str(rank)},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = [(where / f"out-{rank}").read_text(encoding="utf-8") for rank in range(ranks)]
    assert codes == [0] * ranks, "\n".join(said)
    return said[0]


def test_a_plain_state_is_that_of_the_call_and_torch_reads_it(tmp_path: Path, python: str) -> None:
    run(
        python,
        tmp_path,
        """
        import io, torch, stoker
        from torch import nn
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 7))
        optimizer = torch.optim.AdamW(model.parameters())
        def train():
            optimizer.zero_grad()
            model(torch.randn(9, 300)).square().mean().backward()
            optimizer.step()
        def flat(value, found):
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, dict):
                for key in value:
                    found.append(key)
                    flat(value[key], found)
            elif isinstance(value, (list, tuple)):
                for part in value:
                    flat(part, found)
            else:
                found.append(value)
            return found
        def same(one, two):
            one, two = flat(one, []), flat(two, [])
            assert len(one) == len(two)
            for a, b in zip(one, two):
                if isinstance(a, torch.Tensor):
                    assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b), (a, b)
                else:
                    assert a == b, (a, b)
        base = torch.arange(1000.0)
        for step in range(1, 6):
            train()
            state = {
                "model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(),
                "views": [base, base[10:20], base.view(10, 100).t()], "nothing": torch.empty(0), "step": step,
                "kinds": [torch.ones(3).to(kind) for kind in (torch.bfloat16, torch.float16, torch.int8, torch.bool,
                          torch.complex64, torch.float64)],
                "number": torch.tensor(3.5), "text": "\\u00fc",
            }
            expected = io.BytesIO()
            torch.save(state, expected)
            expected.seek(0)
            stoker.checkpoint.save_torch(state, step=step, asynchronous=True)
            train()  # at once, while it is being written
            base.add_(1)
            stoker.checkpoint.wait()
            ours = stoker.checkpoint.load_torch()
            same(ours, torch.load(expected, weights_only=True))
            path = stoker.checkpoint.latest()
            assert path.name == f"step-{step}.pt"
            same(ours, torch.load(path, weights_only=True, mmap=True))
            assert ours["views"][0].data_ptr() + 40 == ours["views"][1].data_ptr()
        """,
    )


def test_what_torch_cannot_save_is_raised_at_the_call(tmp_path: Path, python: str) -> None:
    run(
        python,
        tmp_path,
        """
        import torch, stoker
        for bad in ({"f": lambda: 0},
                    {"a": (b := torch.zeros(4)), "b": b.view(torch.int32)}):
            try:
                stoker.checkpoint.save_torch(bad, asynchronous=True)
            except Exception as exc:
                print(type(exc).__name__)
            else:
                raise AssertionError("it was taken")
        stoker.checkpoint.save_torch({"good": 1}, asynchronous=True)
        assert stoker.checkpoint.load_torch() == {"good": 1}
        """,
    )


DDP = """
import os, sys, torch, torch.distributed as dist, stoker
from torch import nn
dist.init_process_group("gloo", init_method=os.environ["INIT"], rank=int(os.environ["RANK"]),
                        world_size=int(os.environ["WORLD_SIZE"]))
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(20, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
first = 0
state = stoker.checkpoint.load_torch()
if state is not None:
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
data = torch.randn(6, 20, generator=torch.Generator().manual_seed(1))
for step in range(first, first + int(sys.argv[1])):
    optimizer.zero_grad()
    model(data[rank :: world]).square().mean().backward()
    optimizer.step()
    if rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        stoker.checkpoint.save_torch(state, step=step + 1, keep=2, asynchronous=True)
if rank == 0:
    print(f"from {first}: {sum(p.double().sum().item() for p in model.parameters()):.6f}")
dist.barrier()
dist.destroy_process_group()
"""


def test_ddp_resumes_at_another_world_size(tmp_path: Path, python: str) -> None:
    ends = []
    for name, parts in {"changing": ((2, 4), (3, 4)), "alone": ((1, 8),)}.items():
        (tmp_path / name).mkdir()
        first = 0
        for ranks, steps in parts:
            said = run(python, tmp_path / name, DDP, str(steps), ranks=ranks).split()
            assert said[:2] == ["from", f"{first}:"]
            first += steps
        ends.append(float(said[2]))
        assert sorted(os.listdir(tmp_path / name / "checkpoints")) == ["step-7.pt", "step-8.pt"]
    assert ends[0] == pytest.approx(ends[1], abs=1e-4)


FSDP = """
import os, sys, warnings, torch, torch.distributed as dist, stoker
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
warnings.simplefilter("ignore")
dist.init_process_group("gloo", init_method=os.environ["INIT"], rank=int(os.environ["RANK"]),
                        world_size=int(os.environ["WORLD_SIZE"]))
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 5))
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
def gather():
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "step": step, "note": "x" * step}
step = 0
state = gather()
if stoker.checkpoint.load_sharded(state):
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step = state["step"]
    assert state["note"] == "x" * step
print(f"from {step}")
data = torch.randn(12, 33, generator=torch.Generator().manual_seed(1))
def train():
    optimizer.zero_grad()
    model(data[rank::world]).square().mean().backward()
    optimizer.step()
def total(state):
    return sum(value.full_tensor().double().sum().item() for value in state["model"].values())
for _ in range(int(sys.argv[1])):
    train()
    step += 1
    state = gather()
    before = total(state)
    path = stoker.checkpoint.save_sharded(state, step=step, keep=2)
    train()  # at once: what was saved must not know of it
    again = gather()
    stoker.checkpoint.wait()
    dist.barrier()
    # DCP itself reads it.
    dcp.load(again, checkpoint_id=path)
    assert abs(total(again) - before) < 1e-9, (total(again), before)
    assert again["step"] == step
    set_state_dict(model, optimizer, model_state_dict=again["model"], optim_state_dict=again["optimizer"])
if rank == 0:
    print(f"sum {before:.6f}")
dist.barrier()
dist.destroy_process_group()
"""


def test_fsdp_resumes_at_another_world_size(tmp_path: Path, python: str) -> None:
    ends = []
    for name, parts in {"changing": ((2, 3), (3, 2), (1, 1)), "alone": ((1, 6),)}.items():
        (tmp_path / name).mkdir()
        first = 0
        for ranks, steps in parts:
            said = run(python, tmp_path / name, FSDP, str(steps), ranks=ranks).split()
            assert said[:2] == ["from", str(first)]
            first += steps
        ends.append(float(said[3]))
        assert sorted(os.listdir(tmp_path / name / "checkpoints")) == ["step-5", "step-6"]
    assert ends[0] == pytest.approx(ends[1], abs=1e-4)


def test_without_other_ranks_a_sharded_state_is_just_a_state(tmp_path: Path, python: str) -> None:
    run(
        python,
        tmp_path,
        """
        import torch, stoker
        state = {"a": torch.arange(5), "deep": {"b": torch.ones(2, 3).t(), "c": [1, "two"]}}
        stoker.checkpoint.save_sharded(state, step=1, asynchronous=False)
        other = {"a": torch.zeros(5, dtype=torch.int64), "deep": {"b": torch.zeros(3, 2), "c": [0, ""]}}
        assert stoker.checkpoint.load_sharded(other)
        assert torch.equal(other["a"], state["a"]) and torch.equal(other["deep"]["b"], state["deep"]["b"])
        assert other["deep"]["c"] == [1, "two"]
        """,
    )


def test_a_state_is_planned_anew_when_anything_is_new_in_it(tmp_path: Path, python: str) -> None:
    """DCP reads the saved values and computes the same metadata, whatever changed since the save before."""
    run(
        python,
        tmp_path,
        """
        import os, pickle, torch, torch.distributed as dist, stoker
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard
        dist.init_process_group("gloo", init_method=os.environ["INIT"], rank=int(os.environ["RANK"]),
                                world_size=int(os.environ["WORLD_SIZE"]))
        rank, mesh, plans = dist.get_rank(), init_device_mesh("cpu", (2,)), []
        create = DefaultSavePlanner.create_local_plan
        DefaultSavePlanner.create_local_plan = lambda self: plans.append(self) or create(self)

        def part(*shape, value=1.0, dtype=torch.float32, placement=Shard(0)):
            local = torch.full(shape, value, dtype=dtype)
            return DTensor.from_local(local, mesh, [placement], run_check=False)

        def same(one, other):
            if isinstance(one, dict):
                return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
            if isinstance(one, DTensor):
                return one.placements == other.placements and same(one.to_local(), other.to_local())
            if isinstance(one, torch.Tensor):
                return one.dtype == other.dtype and torch.equal(one, other)
            return one == other

        def empty(value):
            if isinstance(value, dict):
                return {key: empty(inner) for key, inner in value.items()}
            if isinstance(value, DTensor):
                return DTensor.from_local(torch.zeros_like(value.to_local()), mesh, value.placements, run_check=False)
            return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None

        def described(path):
            with open(f"{path}/.metadata", "rb") as file:
                found = pickle.load(file)
            return {name: (entry.size, entry.properties, sorted(map(str, entry.chunks))) if hasattr(entry, "size") else entry
                    for name, entry in found.state_dict_metadata.items()}, found.planner_data

        base = {"a": part(4, 3), "b": torch.ones(5), "n": 1}
        states = [
            (base, True),
            ({**base, "n": 2}, False),
            ({**base, "a": part(4, 3, value=2.0), "b": torch.full((5,), 7.0)}, False),
            ({**base, "a": part(6, 3)}, True),
            ({**base, "a": part(4, 3, dtype=torch.float64)}, True),
            ({**base, "a": part(4, 3, placement=Shard(1))}, True),
            ({**base, "a": part(4, 3, placement=Replicate())}, True),
            ({**base, "b": torch.ones(6)}, True),
            ({**base, "b": torch.ones(5, dtype=torch.int32)}, True),
            ({**base, "b": {"c": torch.ones(5)}}, True),
            ({**base, "b.c": torch.ones(5)}, True),
            ({"b": base["b"], "a": base["a"], "n": 1}, True),
            ({**base, "b": 3}, True),
            ({**base, "b": torch.nn.Parameter(torch.ones(5))}, True),
            (base, True),
            (base, False),
        ]
        for step, (state, new) in enumerate(states, 1):
            before = len(plans)
            stoker.checkpoint.save_sharded(state, step=step)
            stoker.checkpoint.wait()
            assert len(plans) - before == new, (step, len(plans) - before)
            dist.barrier()
            found, path = empty(state), f"checkpoints/step-{step}"
            dcp.load(found, checkpoint_id=path)
            assert same(found, state), (step, found, state)
            dcp.save(state, checkpoint_id=f"theirs-{step}")
            dist.barrier()
            assert described(path) == described(f"theirs-{step}"), step
            dist.barrier()
        dist.destroy_process_group()
        """,
        ranks=2,
    )


def test_a_process_that_becomes_another_rank_saves_as_that_one(tmp_path: Path, python: str) -> None:
    """Its mesh and its state equal those before, except for the place of its shards in the whole."""
    run(
        python,
        tmp_path,
        """
        import os, torch, torch.distributed as dist, stoker
        from torch.distributed import checkpoint as dcp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        def begin(rank, name):
            dist.init_process_group("gloo", init_method=os.environ["INIT"] + name, rank=rank, world_size=3)
            mesh = init_device_mesh("cpu", (3,))
            return {"a": DTensor.from_local(torch.full((2,), float(rank)), mesh, [Shard(0)], run_check=False)}

        rank = int(os.environ["RANK"])
        for step, now in enumerate([rank, {0: 0, 1: 2, 2: 1}[rank]], 1):
            stoker.checkpoint.save_sharded(begin(now, str(step)), step=step)
            stoker.checkpoint.wait()
            dist.barrier()
            whole = {"a": torch.zeros(6)}
            dcp.load(whole, checkpoint_id=f"checkpoints/step-{step}", no_dist=True)
            assert whole["a"].tolist() == [0, 0, 1, 1, 2, 2], (step, whole)
            dist.barrier()
            dist.destroy_process_group()
        """,
        ranks=3,
    )


def test_what_fails_on_one_rank_is_raised_on_all(tmp_path: Path, python: str) -> None:
    out = run(
        python,
        tmp_path,
        """
        import os, signal, torch, torch.distributed as dist, stoker
        from stoker.sdk import async_save
        dist.init_process_group("gloo", init_method=os.environ["INIT"], rank=int(os.environ["RANK"]),
                                world_size=int(os.environ["WORLD_SIZE"]))
        rank = dist.get_rank()
        state = {"weight": torch.ones(4), f"own-{rank}": torch.ones(3)}
        stoker.checkpoint.save_sharded(state, step=1)
        stoker.checkpoint.wait()
        dist.barrier()
        assert os.listdir("checkpoints") == ["step-1"]
        # One rank cannot write its part.
        writer = async_save.saver()._writer._process.pid
        if rank == 1:
            os.kill(writer, signal.SIGSTOP)
        stoker.checkpoint.save_sharded(state, step=2)
        if rank == 1:
            os.kill(writer, signal.SIGKILL)
        for what in ({"weight": torch.ones(4)}, {"weight": torch.ones(4), f"bad-{rank}": (lambda: 0) if rank == 1 else 1}):
            try:
                stoker.checkpoint.save_sharded(what, step=3)
            except Exception as exc:
                print(rank, exc)
            else:
                raise AssertionError("nothing was raised")
        # And then all is well again, with another state than before.
        stoker.checkpoint.save_sharded({"weight": torch.ones(9)}, step=4)
        stoker.checkpoint.wait()
        dist.barrier()
        names = sorted(name for name in os.listdir("checkpoints") if not name.startswith("."))
        assert names == ["step-1", "step-4"], names
        dist.destroy_process_group()
        """,
        ranks=2,
    )
    first, second = out.splitlines()
    assert first.startswith("0 no checkpoint was saved; rank 1: ") and "checkpoint step-2 could not" in first
    assert second.startswith("0 "), out


def test_parts_of_two_tasks_are_one_checkpoint_from_which_both_go_on(journey: Callable[..., Journey]) -> None:
    """Each task keeps its own part. After a loss every rank finds all parts, of one step."""
    it = journey("--workers", "2", "--framework", "torch", "--", "python", "torch_sharded.py", "40")
    it.reached(8)
    it.kill("worker-1")
    it.succeeded()
    text = it.text()
    saved = re.findall(r"saved step=(\d+) rank=\d total=(\S+)", text)
    found = re.findall(r"found step=(\d+) rank=(\d) total=(\S+)", text)
    assert {rank for _, rank, _ in found} == {"0", "1"}, text
    assert len({step for step, _, _ in found}) == 1 and int(found[0][0]) > 0, found
    assert {(step, total) for step, _, total in found} <= set(saved), (found, saved)
