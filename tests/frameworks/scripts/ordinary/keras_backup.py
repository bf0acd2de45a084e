"""Keras with BackupAndRestore and a CSV log, as its documentation shows them."""

import time

import keras
import numpy as np

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
inputs = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")


class Slowly(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
        time.sleep(0.5)


model.fit(
    inputs,
    inputs.sum(axis=1),
    epochs=8,
    verbose=0,
    callbacks=[
        keras.callbacks.BackupAndRestore("backup"),
        keras.callbacks.CSVLogger("log.csv", append=True),
        Slowly(),
    ],
)
model.save("model.keras")
