"""Data parallel with MPI: the ranks of mpirun, one Allreduce in each step.

A script that runs under `mpirun` runs here unchanged: Stoker starts mpirun, and its launchers are the
remote shell, so no ssh is needed.
"""

import argparse
import io

import network
import numpy as np
from mpi4py import MPI

import stoker


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.15)
    args = parser.parse_args()

    world = MPI.COMM_WORLD
    (x, y), test = network.digits()
    weights, first = load()
    for epoch in range(first, args.epochs):
        order = np.random.default_rng(epoch).permutation(len(x))
        for rows in np.array_split(order, len(x) // args.batch):
            mine = rows[world.rank :: world.size]
            gradient, _ = network.gradient(weights, x[mine], y[mine])
            world.Allreduce(MPI.IN_PLACE, gradient)
            weights -= args.lr * gradient / len(rows)
        if world.rank == 0:
            save(weights, epoch, network.accuracy(weights, test))

    if world.rank == 0:
        loss, accuracy = network.gradient(weights, x, y)[1] / len(x), network.accuracy(weights, test)
        steps = args.epochs * (len(x) // args.batch)
        print(f"final loss {loss:.6f} accuracy {accuracy:.4f} after {steps} steps on {world.size} rank(s)")


def load() -> tuple[np.ndarray, int]:
    data = stoker.checkpoint.load()
    if data is None:
        return network.fresh(), 0
    with np.load(io.BytesIO(data)) as saved:
        weights, epoch = saved["weights"], int(saved["epoch"])
    print(f"going on after epoch {epoch + 1}", flush=True)
    return weights, epoch + 1


def save(weights: np.ndarray, epoch: int, accuracy: float) -> None:
    stoker.report(step=epoch, accuracy=accuracy)
    buffer = io.BytesIO()
    np.savez(buffer, weights=weights, epoch=epoch)
    stoker.checkpoint.save("last.npz", buffer.getvalue(), step=epoch)


if __name__ == "__main__":
    main()
