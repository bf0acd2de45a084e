"""Sharded with torch: each worker keeps a part of the weights, gradients and optimizer state (FSDP2).

It computes the same as data parallel. But a layer's weights are put together only while they are needed, so
a model may be as large as all workers together can hold. Checkpoints are sharded too (DCP): each worker
writes its part, in parallel, and any number of workers can read it.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import stoker


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="of all workers together")
    args = parser.parse_args()

    if "RANK" not in os.environ:  # outside Stoker: a world of one
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    cuda = torch.cuda.is_available()
    dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = "cuda" if cuda else "cpu"

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    model.to(device)
    mesh = init_device_mesh(device, (size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = load(model, optimizer)

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(x / 16.0, dtype=torch.float32)[order].to(device), torch.tensor(y)[order].to(device)
    for epoch in range(first, args.epochs):
        rows = torch.randperm(1344, generator=torch.Generator().manual_seed(epoch))
        for batch in rows.split(args.batch):
            mine = batch[rank::size]
            loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            stoker.report(step=epoch, loss=loss)
        save(model, optimizer, epoch)

    with torch.no_grad():
        out = model(x)  # by all: each has a part of every layer
    if rank == 0:
        loss = nn.functional.cross_entropy(out[:1344], y[:1344])
        accuracy = (out[1344:].argmax(1) == y[1344:]).float().mean()
        steps = args.epochs * -(-1344 // args.batch)
        print(f"final loss {loss:.6f} accuracy {accuracy:.4f} after {steps} steps on {size} worker(s)")
    dist.destroy_process_group()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Every worker writes its shards into a directory of the same name; Stoker assembles them."""
    dcp.save(
        state_of(model, optimizer, epoch), checkpoint_id=stoker.checkpoint.directory() / f"epoch-{epoch + 1}"
    )


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Into the shards that this worker has now, whichever worker had them when they were written."""
    place = stoker.checkpoint.latest()
    if place is None:
        return 0
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=place)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    epoch = int(state["epoch"])
    print(f"going on after epoch {epoch + 1}", flush=True)
    return epoch + 1


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "epoch": torch.tensor(epoch)}


if __name__ == "__main__":
    main()
