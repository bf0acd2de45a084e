"""TensorFlow, MultiWorkerMirroredStrategy."""

import json
import os

import loop
import tensorflow as tf

config = json.loads(os.environ["TF_CONFIG"])
strategy = tf.distribute.MultiWorkerMirroredStrategy()


@tf.function
def together(number):
    return strategy.reduce("SUM", strategy.run(tf.identity, (number,)), axis=None)


loop.train(
    config["task"]["index"], strategy.num_replicas_in_sync, lambda number: together(tf.constant(number))
)
