"""Data parallel with torch: each worker has the whole model and a part of each batch (DDP).

DDP adds up the gradients with a ring all-reduce while the backward pass still runs. So all workers take the
same step, the one that a single worker would take with the whole batch. Nothing here is specific to Stoker:
torch finds the world in the environment, and checkpoints go to the directory that STOKER_CHECKPOINT_DIR
names.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CHECKPOINTS = Path(os.environ.get("STOKER_CHECKPOINT_DIR", "checkpoints"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64, help="of all workers together")
    args = parser.parse_args()

    if "RANK" not in os.environ:  # outside Stoker: a world of one
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")

    torch.manual_seed(0)
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = (part.to(device) for part in digits())
    train, test = slice(0, 1344), slice(1344, None)

    first = load(model.module, optimizer)
    for epoch in range(first, args.epochs):
        order = torch.randperm(1344, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(args.batch):
            # Every worker draws the same batch and takes a part; equal parts make DDP's mean that of the whole.
            mine = batch[rank::size]
            loss = nn.functional.cross_entropy(model(x[train][mine]), y[train][mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            save(model.module, optimizer, epoch)

    with torch.no_grad():
        loss = nn.functional.cross_entropy(model.module(x[train]), y[train])
        accuracy = (model.module(x[test]).argmax(1) == y[test]).float().mean()
    if rank == 0:
        steps = args.epochs * -(-1344 // args.batch)
        print(f"final loss {loss:.6f} accuracy {accuracy:.4f} after {steps} steps on {size} worker(s)")
    dist.destroy_process_group()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return torch.tensor(x / 16.0, dtype=torch.float32)[order], torch.tensor(y)[order]


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The epoch to begin with. Every worker reads the same file, whatever the number of workers that wrote it."""
    path = os.environ.get("STOKER_RESUME_FROM")
    if path is None:
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    print(f"going on after epoch {state['epoch'] + 1}", flush=True)
    return int(state["epoch"]) + 1


def save(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Renamed into place: whichever worker is killed, and when, a checkpoint is complete or does not exist."""
    CHECKPOINTS.mkdir(exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, CHECKPOINTS / "last.pt.tmp")
    (CHECKPOINTS / "last.pt.tmp").replace(CHECKPOINTS / "last.pt")


if __name__ == "__main__":
    main()
