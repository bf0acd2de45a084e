"""Data parallel with TensorFlow: MultiWorkerMirroredStrategy, which finds the world in TF_CONFIG.

Variables are the same in every worker. Each worker computes the gradient of its part of the batch, and the
collective sum gives that of the whole batch. The loop is explicit, to show the only place where workers
meet.
"""

import argparse
import os

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import stoker

HIDDEN = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="of all workers together")
    args = parser.parse_args()

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else of TensorFlow
    me = strategy.cluster_resolver.task_id if "TF_CONFIG" in os.environ else 0
    size = strategy.num_replicas_in_sync
    with strategy.scope():
        variables = network()
        epoch = tf.Variable(-1, dtype=tf.int64, trainable=False)
    checkpoint = tf.train.Checkpoint(epoch=epoch, **variables)
    resumed = stoker.checkpoint.latest()
    if resumed is not None:
        checkpoint.read(str(resumed)).assert_consumed()
        print(f"going on after epoch {int(epoch.numpy()) + 1}", flush=True)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        def replica(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(losses(variables, x, y)) / args.batch
            gradients = tape.gradient(loss, list(variables.values()))
            context = tf.distribute.get_replica_context()
            summed = context.all_reduce(tf.distribute.ReduceOp.SUM, [loss, *gradients])
            for variable, gradient in zip(variables.values(), summed[1:], strict=True):
                variable.assign_sub(0.3 * gradient)
            return summed[0]

        return strategy.run(replica, args=(x, y))

    x, y = digits()
    for number in range(int(epoch.numpy()) + 1, args.epochs):
        order = np.random.default_rng(number).permutation(1344)
        for batch in np.split(order, 1344 // args.batch):
            mine = batch[me::size]
            loss = step(tf.constant(x[mine]), tf.constant(y[mine]))
        epoch.assign(number)
        if me == 0:
            stoker.report(step=number, loss=float(loss))
            checkpoint.write(str(stoker.checkpoint.directory() / f"epoch-{number + 1}"))

    local = {name: tf.constant(variable.numpy()) for name, variable in variables.items()}
    loss = float(tf.reduce_mean(losses(local, x[:1344], y[:1344])))
    accuracy = float(np.mean(tf.argmax(logits(local, x[1344:]), 1).numpy() == y[1344:]))
    if me == 0:
        steps = args.epochs * (1344 // args.batch)
        print(f"final loss {loss:.6f} accuracy {accuracy:.4f} after {steps} steps on {size} worker(s)")


def network() -> dict[str, tf.Variable]:
    rng = np.random.default_rng(0)
    return {
        "w1": tf.Variable(rng.normal(0, 0.2, (64, HIDDEN)), dtype=tf.float32),
        "b1": tf.Variable(tf.zeros(HIDDEN)),
        "w2": tf.Variable(rng.normal(0, 0.1, (HIDDEN, 10)), dtype=tf.float32),
        "b2": tf.Variable(tf.zeros(10)),
    }


def logits(variables: dict[str, tf.Variable], x: tf.Tensor) -> tf.Tensor:
    hidden = tf.nn.relu(x @ variables["w1"] + variables["b1"])
    return hidden @ variables["w2"] + variables["b2"]


def losses(variables: dict[str, tf.Variable], x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits(variables, x))


def digits() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return (x / 16.0).astype(np.float32)[order], y[order]


if __name__ == "__main__":
    main()
