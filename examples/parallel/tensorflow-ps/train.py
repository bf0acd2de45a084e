"""Asynchronous training with TensorFlow: ParameterServerStrategy, which finds the world in TF_CONFIG.

The chief gives each step to a free worker. Workers compute gradients and apply them to the variables on the
parameter servers, and no worker waits for another. All tasks run this script; workers and parameter servers
only serve.
"""

import argparse
import io
import os

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import stoker

HIDDEN = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()

    world = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if world.task_type in ("worker", "ps"):
        tf.distribute.Server(
            world.cluster_spec(),
            job_name=world.task_type,
            task_index=world.task_id,
            protocol=world.rpc_layer or "grpc",
        ).join()  # until Stoker ends it, once the chief has ended
    lead(args, world)


def lead(args: argparse.Namespace, world: tf.distribute.cluster_resolver.ClusterResolver) -> None:
    strategy = tf.distribute.ParameterServerStrategy(world)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():  # variables go to the parameter servers, in turn
        variables = network()
    first = load(variables)
    x, y = digits()

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(variables, x, y))
        for variable, gradient in zip(
            variables.values(), tape.gradient(loss, list(variables.values())), strict=True
        ):
            variable.assign_sub(0.3 * gradient)

    for epoch in range(first, args.epochs):
        order = np.random.default_rng(epoch).permutation(1344)
        for batch in np.split(order, 1344 // args.batch):
            coordinator.schedule(step, args=(tf.constant(x[batch]), tf.constant(y[batch])))
        coordinator.join()
        stoker.report(step=epoch, loss=tf.reduce_mean(losses(variables, x[:1344], y[:1344])))
        save(variables, epoch)

    loss = float(tf.reduce_mean(losses(variables, x[:1344], y[:1344])))
    accuracy = float(np.mean(tf.argmax(logits(variables, x[1344:]), 1).numpy() == y[1344:]))
    workers = len(world.cluster_spec().task_indices("worker"))
    steps = args.epochs * (1344 // args.batch)
    print(
        f"final loss {loss:.6f} accuracy {accuracy:.4f} after {steps} steps on {workers} worker(s)",
        flush=True,
    )
    os._exit(0)  # TensorFlow's own exit waits for a worker that died and is not back yet, perhaps for ever.


def load(variables: dict[str, tf.Variable]) -> int:
    data = stoker.checkpoint.load()
    if data is None:
        return 0
    with np.load(io.BytesIO(data)) as saved:
        for name, variable in variables.items():
            variable.assign(saved[name])
        epoch = int(saved["epoch"])
    print(f"going on after epoch {epoch + 1}", flush=True)
    return epoch + 1


def save(variables: dict[str, tf.Variable], epoch: int) -> None:
    """The chief fetches the variables and writes. TensorFlow's own checkpoints are written by the parameter servers, each
    on its own machine, and need a directory that all of them share."""
    buffer = io.BytesIO()
    np.savez(buffer, epoch=epoch, **{name: variable.numpy() for name, variable in variables.items()})
    stoker.checkpoint.save("last.npz", buffer.getvalue(), step=epoch)


def network() -> dict[str, tf.Variable]:
    rng = np.random.default_rng(0)
    return {
        "w1": tf.Variable(rng.normal(0, 0.2, (64, HIDDEN)), dtype=tf.float32),
        "b1": tf.Variable(tf.zeros(HIDDEN)),
        "w2": tf.Variable(rng.normal(0, 0.1, (HIDDEN, 10)), dtype=tf.float32),
        "b2": tf.Variable(tf.zeros(10)),
    }


def logits(variables: dict[str, tf.Variable], x: tf.Tensor) -> tf.Tensor:
    hidden = tf.nn.relu(tf.matmul(x, variables["w1"]) + variables["b1"])
    return tf.matmul(hidden, variables["w2"]) + variables["b2"]


def losses(variables: dict[str, tf.Variable], x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits(variables, x))


def digits() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return (x / 16.0).astype(np.float32)[order], y[order]


if __name__ == "__main__":
    main()
