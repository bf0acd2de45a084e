"""Data parallel with JAX: one program over the devices of all workers.

The batch is one array whose rows are on different workers; the weights are the same everywhere. So the
compiler knows where sums over workers are needed. `stoker.jax_initialize()` tells JAX the members of the
world.
"""

import argparse
import io

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import stoker

Weights = dict[str, jax.Array]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="of all workers together")
    args = parser.parse_args()

    stoker.jax_initialize()
    me, size = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    by_rows = NamedSharding(mesh, PartitionSpec("data"))

    x, y = digits()
    weights, first = load()
    weights = {
        name: jax.make_array_from_process_local_data(everywhere, each) for name, each in weights.items()
    }
    for epoch in range(first, args.epochs):
        order = np.random.default_rng(epoch).permutation(1344)
        for batch in np.split(order, 1344 // args.batch):
            mine = np.split(batch, size)[me]
            local = (x[mine], y[mine])
            rows = [jax.make_array_from_process_local_data(by_rows, part) for part in local]
            weights, loss = step(weights, *rows)
        if me == 0:
            stoker.report(step=epoch, loss=loss)
            save(weights, epoch)

    final = {name: np.asarray(each) for name, each in weights.items()}
    if me == 0:
        accuracy = float((logits(final, x[1344:]).argmax(1) == y[1344:]).mean())
        steps = args.epochs * (1344 // args.batch)
        print(
            f"final loss {mean_loss(final, x[:1344], y[:1344]):.6f} accuracy {accuracy:.4f} "
            f"after {steps} steps on {size} worker(s)"
        )


@jax.jit
def step(weights: Weights, x: jax.Array, y: jax.Array) -> tuple[Weights, jax.Array]:
    loss, gradient = jax.value_and_grad(mean_loss)(weights, x, y)
    return jax.tree.map(lambda weight, slope: weight - 0.3 * slope, weights, gradient), loss


def mean_loss(weights: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
    chances = jax.nn.log_softmax(logits(weights, x))
    return -jnp.take_along_axis(chances, y[:, None], axis=1).mean()


def logits(weights: Weights, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ weights["w1"] + weights["b1"]) @ weights["w2"] + weights["b2"]


def digits() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return (x / 16.0).astype(np.float32)[order], y[order]


def load() -> tuple[dict[str, np.ndarray], int]:
    data = stoker.checkpoint.load()
    if data is None:
        rng = np.random.default_rng(0)
        w1, w2 = rng.normal(0, 0.2, (64, 128)), rng.normal(0, 0.1, (128, 10))
        fresh = {"w1": w1, "b1": np.zeros(128), "w2": w2, "b2": np.zeros(10)}
        return {name: each.astype(np.float32) for name, each in fresh.items()}, 0
    with np.load(io.BytesIO(data)) as saved:
        weights = dict(saved)
    epoch = int(weights.pop("epoch"))
    print(f"going on after epoch {epoch + 1}", flush=True)
    return weights, epoch + 1


def save(weights: Weights, epoch: int) -> None:
    """Every worker has all of them: one writes. What lies in parts on the workers is saved with Orbax, by all."""
    buffer = io.BytesIO()
    np.savez(buffer, epoch=epoch, **{name: np.asarray(each) for name, each in weights.items()})
    stoker.checkpoint.save("last.npz", buffer.getvalue(), step=epoch)


if __name__ == "__main__":
    main()
