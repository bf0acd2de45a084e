"""Pipeline parallel with torch: each worker has some of the layers, and batches pass in pieces.

A batch is cut into micro-batches. While the second worker computes the first one, the first worker already
computes the second. So all are busy, except while the pipe fills and empties. Gradients add up over the
micro-batches, and there is one step at the end of the batch (the schedule of GPipe). The result is that of
one worker alone.
"""

import argparse
import io
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn

import stoker

WIDTH = 64


class Stage:
    """The layers of this worker, and its place between its neighbours."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        cuts = [len(layers) * at // self.size for at in range(self.size + 1)]
        self.first, self.total = cuts[self.rank], len(layers)
        self.layers = nn.Sequential(*layers[self.first : cuts[self.rank + 1]])

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input of this stage, and its output for the next."""
        if not self.is_first:
            x = torch.empty(len(x), WIDTH)
            dist.recv(x, self.rank - 1)
            x.requires_grad_()
        out = self.layers(x)
        if not self.is_last:
            dist.send(out.detach(), self.rank + 1)
        return x, out

    def backward(self, x: Tensor, out: Tensor, loss: Tensor | None) -> None:
        if loss is not None:
            loss.backward()
        else:
            gradient = torch.empty_like(out)
            dist.recv(gradient, self.rank + 1)
            out.backward(gradient)
        if not self.is_first:
            dist.send(x.grad, self.rank - 1)

    def step(self, x: Tensor, y: Tensor, pieces: int) -> float:
        """Forward with all micro-batches, then backward with all. The mean loss is known to the last stage."""
        total, passed = 0.0, []
        for part, labels in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            came, out = self.forward(part)
            loss = None
            if self.is_last:
                loss = nn.functional.cross_entropy(out, labels, reduction="sum") / len(x)
                total += float(loss.detach())
            passed.append((came, out, loss))
        for came, out, loss in passed:
            self.backward(came, out, loss)
        return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=4)
    args = parser.parse_args()

    if "RANK" not in os.environ:  # outside Stoker: a world of one
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)]
    stage = Stage([*hidden, nn.Linear(WIDTH, 10)])
    first = load(stage)
    optimizer = torch.optim.SGD(stage.layers.parameters(), lr=0.3)

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(x / 16.0, dtype=torch.float32)[order], torch.tensor(y)[order]
    for epoch in range(first, args.epochs):
        rows = torch.randperm(1344, generator=torch.Generator().manual_seed(epoch))
        for batch in rows.split(args.batch):
            optimizer.zero_grad()
            loss = stage.step(x[batch], y[batch], args.micro_batches)
            optimizer.step()
        if stage.is_last:
            stoker.report(step=epoch, loss=loss)
        save(stage, epoch)

    with torch.no_grad():
        out = stage.forward(x)[1]
    if stage.is_last:
        loss = nn.functional.cross_entropy(out[:1344], y[:1344])
        accuracy = (out[1344:].argmax(1) == y[1344:]).float().mean()
        steps = args.epochs * -(-1344 // args.batch)
        print(f"final loss {loss:.6f} accuracy {accuracy:.4f} after {steps} steps on {stage.size} worker(s)")
    dist.destroy_process_group()


def save(stage: Stage, epoch: int) -> None:
    """Each worker saves its layers, a file for each: together they are the checkpoint, for any number of stages."""
    files = {}
    for number, layer in enumerate(stage.layers, stage.first):
        buffer = io.BytesIO()
        torch.save({"layer": layer.state_dict(), "epoch": epoch}, buffer)
        files[name(number, stage)] = buffer.getvalue()
    stoker.checkpoint.save(f"epoch-{epoch + 1}", files, step=epoch, keep=2)


def name(number: int, stage: Stage) -> str:
    """Contains the number of stages, so that some of the files are not taken for all."""
    return f"layer-{number + 1:05}-of-{stage.total:05}.pt"


def load(stage: Stage) -> int:
    place = stoker.checkpoint.load()
    if place is None:
        return 0
    for number, layer in enumerate(stage.layers, stage.first):
        state = torch.load(place / name(number, stage), weights_only=True)
        layer.load_state_dict(state["layer"])
    print(f"going on after epoch {state['epoch'] + 1}", flush=True)
    return int(state["epoch"]) + 1


if __name__ == "__main__":
    main()
