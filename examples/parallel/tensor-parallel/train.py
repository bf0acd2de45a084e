"""Tensor parallel with torch: each worker has a part of every layer, and all see the whole batch.

Two layers are cut so that they need one sum forward and one backward. The first is cut by columns: each
worker computes some of the hidden units. The second is cut by rows: each worker uses its hidden units to
compute its share of every output, and the shares are added up. The two collectives mirror each other: a
copy forward is a sum backward, and a sum forward is a copy backward. Megatron-LM does this to the layers of
a transformer.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn

import stoker


class Copied(torch.autograd.Function):
    """Forward: every worker has it already. Backward: every worker used it, so the gradients are summed."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Summed(torch.autograd.Function):
    """Forward: the shares are summed. Backward: the gradient of a sum is that of each of its terms."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class ColumnParallel(nn.Module):
    """Some of a linear layer's outputs."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(share(whole.weight.detach(), 0))
        self.bias = nn.Parameter(share(whole.bias.detach(), 0))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(Copied.apply(x), self.weight, self.bias)


class RowParallel(nn.Module):
    """All of a linear layer's outputs, from some of its inputs."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(share(whole.weight.detach(), 1))
        self.bias = nn.Parameter(whole.bias.detach().clone())  # the same everywhere, added after the sum

    def forward(self, x: Tensor) -> Tensor:
        return Summed.apply(nn.functional.linear(x, self.weight)) + self.bias


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--save-every", type=int, default=20)
    args = parser.parse_args()

    if "RANK" not in os.environ:  # outside Stoker: a world of one
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(64, args.hidden), nn.ReLU(), nn.Linear(args.hidden, 10))
    first = load(whole)
    model = nn.Sequential(ColumnParallel(whole[0]), nn.ReLU(), RowParallel(whole[2]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(x / 16.0, dtype=torch.float32)[order], torch.tensor(y)[order]
    for step in range(first, args.steps):
        loss = nn.functional.cross_entropy(model(x[:1344]), y[:1344])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % args.save_every == 0:
            stoker.report(step=step, loss=loss)
            save(model, step)

    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(x[:1344]), y[:1344])
        accuracy = (model(x[1344:]).argmax(1) == y[1344:]).float().mean()
    if dist.get_rank() == 0:
        size = dist.get_world_size()
        print(f"final loss {loss:.6f} accuracy {accuracy:.4f} after {args.steps} steps on {size} worker(s)")
    dist.destroy_process_group()


def share(whole: Tensor, axis: int) -> Tensor:
    """This worker's part of a tensor."""
    return whole.tensor_split(dist.get_world_size(), axis)[dist.get_rank()].clone()


def joined(part: Tensor, axis: int, length: int) -> Tensor:
    """The whole of which every worker has a part. Parts may differ in size by one, so each is sent in a full row."""
    size = dist.get_world_size()
    widest = -(-length // size)
    row = part.new_zeros([widest if at == axis else count for at, count in enumerate(part.shape)])
    row.narrow(axis, 0, part.shape[axis]).copy_(part)
    rows = [torch.empty_like(row) for _ in range(size)]
    dist.all_gather(rows, row)
    lengths = [len(each) for each in torch.arange(length).tensor_split(size)]
    return torch.cat([each.narrow(axis, 0, n) for each, n in zip(rows, lengths, strict=True)], axis)


def load(whole: nn.Module) -> int:
    """Checkpoints have the whole layers, so that they can be cut for any number of workers."""
    state = stoker.checkpoint.load_torch()
    if state is None:
        return 0
    whole.load_state_dict(state["model"])
    print(f"going on after step {state['step'] + 1}", flush=True)
    return int(state["step"]) + 1


@torch.no_grad()
def save(model: nn.Sequential, step: int) -> None:
    """All workers gather it, one writes it. A model that does not fit one worker is saved in parts: see ../fsdp."""
    first, _, last = model
    hidden = torch.tensor(len(first.bias))
    dist.all_reduce(hidden)
    state = {
        "0.weight": joined(first.weight, 0, int(hidden)),
        "0.bias": joined(first.bias, 0, int(hidden)),
        "2.weight": joined(last.weight, 1, int(hidden)),
        "2.bias": last.bias,
    }
    if dist.get_rank() == 0:
        stoker.checkpoint.save_torch({"model": state, "step": step}, "last.pt", step=step)


if __name__ == "__main__":
    main()
