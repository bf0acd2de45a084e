"""Train a small neural network on real handwritten digits (1,797 images that ship with scikit-learn).

Runs anywhere: `python train.py`. Under Stoker it runs on as many workers as the job file says. Each takes
its part of every batch, and the ring adds up their gradients. So all take the step that one worker alone
would have taken. It reports its curve and resumes from its newest checkpoint after a crash, with more
workers or fewer. On SIGTERM it saves and stops, and it leaves its model as the run's output.
"""

import argparse
import io
import os
import time
from pathlib import Path

import network
import numpy as np
import ring

import stoker


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16, help="of all workers together")
    parser.add_argument("--lr", type=float, default=0.15)
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args()

    world = ring.from_environment()
    train, test = network.digits()
    weights, first = load(args.hidden)
    accuracy = network.accuracy(weights, test)

    for epoch in range(first, args.epochs):
        begun = time.monotonic()
        loss = train_epoch(world, weights, train, args.batch, args.lr, np.random.default_rng(epoch))
        accuracy = network.accuracy(weights, test)
        if world.rank == 0:
            speed = len(train[0]) / (time.monotonic() - begun)
            stoker.report(step=epoch, loss=loss, accuracy=accuracy, samples_per_second=speed)
            save(weights, epoch, accuracy)
            print(f"epoch {epoch + 1:3d}/{args.epochs}  loss {loss:.4f}  accuracy {accuracy:.4f}")
        if world.all_reduce(np.array([float(stoker.should_stop())]))[0]:
            print("asked to stop; the checkpoint is written")
            return

    if world.rank == 0:
        output = Path(os.environ.get("STOKER_OUTPUT_DIR", "."))
        np.savez(output / "model.npz", weights=weights)
        print(f"final accuracy {accuracy:.4f} after {args.epochs} epochs on {world.size} worker(s)")
    world.close()


def train_epoch(
    world: ring.Ring,
    weights: np.ndarray,
    train: network.Data,
    batch: int,
    lr: float,
    rng: np.random.Generator,
) -> float:
    """Changes the weights; returns the mean loss. Every worker draws the same batches and takes a part of each."""
    x, y = train
    total = 0.0
    for rows in np.array_split(rng.permutation(len(x)), len(x) // batch):
        mine = rows[world.rank :: world.size]
        gradient, loss = network.gradient(weights, x[mine], y[mine])
        summed = world.all_reduce(np.append(gradient, loss))
        weights -= lr * summed[:-1] / len(rows)
        total += summed[-1]
    return float(total / len(x))


def load(hidden: int) -> tuple[np.ndarray, int]:
    """The newest checkpoint, or fresh weights."""
    data = stoker.checkpoint.load()
    if data is None:
        return network.fresh(hidden), 0
    with np.load(io.BytesIO(data)) as saved:
        weights, epoch = saved["weights"], int(saved["epoch"])
    print(f"going on after epoch {epoch + 1}")
    return weights, epoch + 1


def save(weights: np.ndarray, epoch: int, accuracy: float) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, weights=weights, epoch=epoch)
    stoker.checkpoint.save("digits.npz", buffer.getvalue(), step=epoch, metrics={"accuracy": accuracy})


if __name__ == "__main__":
    main()
