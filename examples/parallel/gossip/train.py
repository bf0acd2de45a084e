"""Train on handwritten digits by gossip: each worker has its own weights and data and two neighbours.

After each step a worker and one of its two neighbours, in turn, average: each takes the mean of its own
weights and the other's. A worker waits only for that neighbour, and the progress of one worker reaches all
a few steps later. The weights are cut into shards, and one shard travels in a step. With 8 shards a step
sends an eighth of the model, for any number of workers.
"""

import argparse
import io
import os
from pathlib import Path

import network
import numpy as np
import ring

import stoker


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8, help="of each worker")
    parser.add_argument("--lr", type=float, default=0.15)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=500)
    args = parser.parse_args()

    world = ring.from_environment()
    (x, y), test = network.digits()
    own_x, own_y = x[world.rank :: world.size], y[world.rank :: world.size]
    weights, first = load(world)
    shards = np.array_split(weights, args.shards)  # views: a shard that changes is the weights that change

    for step in range(first, args.steps):
        rows = np.random.default_rng((step, world.rank)).integers(0, len(own_x), args.batch)
        gradient, loss = network.gradient(weights, own_x[rows], own_y[rows])
        weights -= args.lr * gradient / args.batch
        distance = meet(world, step, shards[step // 2 % args.shards])
        if (step + 1) % args.save_every == 0:
            stoker.report(step=step, loss=loss / args.batch, distance=distance)
            save(weights, step, world)
            if stoker.should_stop():
                return

    for step in range(2 * world.size):  # No more steps, only exchanges, until all replicas agree.
        for shard in shards:
            meet(world, step, shard)
    accuracy = network.accuracy(weights, test)
    loss = network.gradient(weights, x, y)[1] / len(x)
    print(f"worker {world.rank}: final loss {loss:.4f} accuracy {accuracy:.4f} after {args.steps} steps")
    if world.rank == 0:
        np.savez(Path(os.environ.get("STOKER_OUTPUT_DIR", ".")) / "model.npz", weights=weights)
    world.close()


def meet(world: ring.Ring, step: int, shard: np.ndarray) -> float:
    """Even steps: 0 meets 1, 2 meets 3, ...; odd steps: 1 meets 2, ..., and the last meets 0. A worker without a
    partner (the last of an odd number) waits for its next turn. Returns how far apart the two were."""
    first = (world.rank - step) % 2 == 0
    partner = (world.rank + (1 if first else -1)) % world.size
    if world.size == 1 or (world.size % 2 and {world.rank, partner} == {0, world.size - 1}):
        return 0.0
    side = world.right if first else world.left
    theirs = ring.exchange(shard, side, np.empty_like(shard), side)
    distance = float(np.abs(theirs - shard).max())
    shard += theirs
    shard /= 2
    return distance


def load(world: ring.Ring) -> tuple[np.ndarray, int]:
    """This worker's own weights; where the number of workers has changed, the mean of all that were saved."""
    place = stoker.checkpoint.load()
    if place is None:
        return network.fresh(), 0
    saved = sorted(place.glob("weights-*.npz"))
    own = place / f"weights-{world.rank + 1:05}-of-{world.size:05}.npz"
    parts = [np.load(io.BytesIO(path.read_bytes())) for path in ([own] if own in saved else saved)]
    print(f"worker {world.rank}: going on after step {parts[0]['step']}", flush=True)
    return np.mean([part["weights"] for part in parts], axis=0), int(parts[0]["step"]) + 1


def save(weights: np.ndarray, step: int, world: ring.Ring) -> None:
    """Each worker saves its part under one name: together they are the checkpoint."""
    buffer = io.BytesIO()
    np.savez(buffer, weights=weights, step=step)
    part = {f"weights-{world.rank + 1:05}-of-{world.size:05}.npz": buffer.getvalue()}
    stoker.checkpoint.save(f"step-{step + 1}", part, step=step, keep=2)


if __name__ == "__main__":
    main()
