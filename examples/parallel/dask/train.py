"""Dask prepares the data, torch trains on it: the workers make one epoch ahead.

Each epoch sees every image slightly moved and dimmed, each time in another way. That is work for the
processors of many machines, and needs no GPU. The script, Dask's client, trains with the results. If a
worker dies, Dask gives its unfinished pieces to another.
"""

import argparse
import os

import numpy as np
import torch
from dask.distributed import Client, Future
from sklearn.datasets import load_digits
from torch import nn

import stoker

PIECES = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()

    x, y = digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = load(model, optimizer)

    address = os.environ.get("DASK_SCHEDULER_ADDRESS")
    with Client(address) if address else Client(processes=False, dashboard_address=None) as dask:
        labels = np.array_split(y[:1344], PIECES)

        def order(epoch: int) -> list[Future]:
            return [dask.submit(prepare, piece, epoch) for piece in range(PIECES)]

        coming = order(first)
        for epoch in range(first, args.epochs):
            ready, coming = coming, order(epoch + 1)
            loss = 0.0
            for future, answers in zip(ready, labels, strict=True):
                loss += train(model, optimizer, future.result(), answers, args.batch) / PIECES
            stoker.report(step=epoch, loss=loss)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            stoker.checkpoint.save_torch(state, "last.pt", step=epoch)
        workers = len(dask.scheduler_info()["workers"])

    with torch.no_grad():
        out = model(torch.from_numpy(x))
        loss = nn.functional.cross_entropy(out[:1344], torch.from_numpy(y[:1344]))
        accuracy = float((out[1344:].argmax(1).numpy() == y[1344:]).mean())
    steps = args.epochs * PIECES * -(-1344 // PIECES // args.batch)
    print(f"final loss {loss:.6f} accuracy {accuracy:.4f} after {steps} steps, {workers} worker(s) prepared")


def prepare(piece: int, epoch: int) -> np.ndarray:
    """Runs on a worker, which reads the data itself. So another worker can make a lost piece again, with
    the same result."""
    images = np.array_split(digits()[0][:1344], PIECES)[piece]
    rng = np.random.default_rng((epoch, piece))
    shifted = images.reshape(-1, 8, 8).copy()
    for image in shifted:
        image[:] = np.roll(image, rng.integers(-1, 2, 2), (0, 1)) * rng.uniform(0.8, 1.2)
    return np.where(rng.random((len(images), 1)) < 0.5, shifted.reshape(-1, 64), images).astype(np.float32)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: np.ndarray, y: np.ndarray, batch: int
) -> float:
    total = 0.0
    pieces = list(zip(torch.from_numpy(x).split(batch), torch.from_numpy(y).split(batch), strict=True))
    for images, labels in pieces:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) / len(pieces)
    return total


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    state = stoker.checkpoint.load_torch()
    if state is None:
        return 0
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    print(f"going on after epoch {state['epoch'] + 1}", flush=True)
    return int(state["epoch"]) + 1


def digits() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return (x / 16.0).astype(np.float32)[order], y[order]


if __name__ == "__main__":
    main()
