"""TensorFlow, ParameterServerStrategy: the chief schedules, the workers add to a variable that a server holds."""

import time

import loop
import tensorflow as tf

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
kind, index = resolver.task_type, resolver.task_id
cluster = resolver.cluster_spec().as_dict()

if kind in ("worker", "ps"):
    loop.say(f"serving {kind} {index}")
    server = tf.distribute.Server(resolver.cluster_spec(), job_name=kind, task_index=index, protocol="grpc")
    server.join()

strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
state = loop.begin()
with strategy.scope():
    total = tf.Variable(state["total"], dtype=tf.int64)


@tf.function
def add(number):
    total.assign_add(tf.cast(number, tf.int64))


world = len(cluster["worker"])
while state["step"] < loop.STEPS:
    state["step"] += 1
    for rank in range(world):
        coordinator.schedule(add, args=((rank + 1) * state["step"],))
    coordinator.join()
    state["total"] = int(total.numpy())
    loop.say(f"step {state['step']} rank 0 of 1")
    loop.keep(state)
    time.sleep(loop.PAUSE)
loop.say(f"finished {state['step']} rank 0 of 1 total {state['total']} on {total.device}")
