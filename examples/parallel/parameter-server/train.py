"""Train on handwritten digits with a parameter server: synchronous, asynchronous, or with bounded staleness.

    python train.py --staleness 0      all workers in step
    python train.py --staleness inf    no worker waits
    python train.py --staleness 4      no worker is more than 4 steps ahead of the slowest

The same script is the server and the workers: the role says which. Outside Stoker it is both.
"""

import argparse
import io
import os
import time
from pathlib import Path

import network
import numpy as np
from parameter_server import Client, Server

import stoker

SAVE_EVERY = 1.0
"""Seconds between the server's checkpoints."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--staleness", type=float, default=4)
    parser.add_argument("--steps", type=int, default=2000, help="of each worker")
    parser.add_argument("--batch", type=int, default=16, help="of all workers together")
    parser.add_argument("--lr", type=float, default=0.15)
    parser.add_argument(
        "--delay", type=float, default=0, help="seconds added to each step of the last worker"
    )
    args = parser.parse_args()

    role = os.environ.get("STOKER_ROLE") if "STOKER_PEERS_PS" in os.environ else None
    server = os.environ.get("STOKER_PEERS_PS", "127.0.0.1:0").split(",")[0]
    workers = len(os.environ.get("STOKER_PEERS_WORKER", "here").split(","))
    worker = int(os.environ["STOKER_TASK_INDEX"]) if role else 0
    if role != "worker":
        serving = Server(*load(workers), args.staleness)
        port = serving.begin(server)
        server = server if role else f"127.0.0.1:{port}"
    if role == "ps":
        keep(serving)
    else:
        work(args, server, worker, workers)


def keep(serving: Server) -> None:
    """Save at intervals, while other threads serve. Stoker ends the server once the workers have ended."""
    saved: list[int] = []
    while not stoker.should_stop():
        time.sleep(SAVE_EVERY)
        weights, clocks = serving.state()
        if clocks != saved:
            saved = clocks
            buffer = io.BytesIO()
            np.savez(buffer, weights=weights, clocks=clocks)
            stoker.checkpoint.save("server.npz", buffer.getvalue(), step=min(clocks))


def load(workers: int) -> tuple[np.ndarray, list[int]]:
    """The newest checkpoint, or fresh weights. With another number of workers, all begin where the slowest was."""
    data = stoker.checkpoint.load()
    if data is None:
        return network.fresh(), [0] * workers
    with np.load(io.BytesIO(data)) as saved:
        weights, clocks = saved["weights"], saved["clocks"].tolist()
    print(f"going on after step {min(clocks)}", flush=True)
    return weights, clocks if len(clocks) == workers else [min(clocks)] * workers


def work(args: argparse.Namespace, server: str, worker: int, workers: int) -> None:
    (x, y), test = network.digits()
    generation = int(os.environ.get("STOKER_GENERATION", "0"))
    client = Client(server, worker, len(network.fresh()), args.staleness, generation)
    print(f"worker {worker} begins at step {client.clock}", flush=True)
    widest, losses = 0, [0.0]
    while not client.finish(args.steps):
        if stoker.should_stop():
            return
        weights = client.pull()
        widest = max(widest, client.gap)
        rows = np.random.default_rng(client.clock).permutation(len(x))[: args.batch]
        mine = rows[worker::workers]
        gradient, loss = network.gradient(weights, x[mine], y[mine])
        if worker == workers - 1:
            time.sleep(args.delay)
        client.push(-args.lr * gradient / args.batch)
        losses = [*losses[-99:], loss / max(1, len(mine))]
        if client.clock % 100 == 0:
            stoker.report(step=client.clock, loss=float(np.mean(losses)), gap=client.gap)
    weights = client.pull()
    print(f"worker {worker}: {client.clock} steps, never more than {widest} ahead", flush=True)
    if worker == 0:
        output = Path(os.environ.get("STOKER_OUTPUT_DIR", "."))
        np.savez(output / "model.npz", weights=weights)
        loss = network.gradient(weights, x, y)[1] / len(x)
        print(
            f"final loss {loss:.4f} accuracy {network.accuracy(weights, test):.4f} after {args.steps} steps"
        )
    client.close()


if __name__ == "__main__":
    main()
