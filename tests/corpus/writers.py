"""The writers of the corpus: real libraries saving tiny models, as people's scripts do.

Run by `record.py` under strace, one writer per process: `python writers.py NAME DIRECTORY`. Each saves a few
times, and says after each call that returned what is complete now (`done`).
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_writers

MARK = "/stoker-corpus-mark"


def done(*names: str) -> None:
    """Leaves a trace that the recorder recognises: these checkpoints are complete at this moment."""
    os.access(f"{MARK}/{json.dumps(names)}", os.F_OK)


def _state(step: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(step)
    weights = {f"layer{i}": torch.rand(24, 24, generator=generator) for i in range(3)}
    return {"model": weights, "step": step, "lr": 0.1 / (step + 1)}


def torch_in_place(directory: Path) -> None:
    import torch

    for step in range(3):
        torch.save(_state(step), directory / "last.pt")
        done("last.pt")


def torch_steps(directory: Path) -> None:
    import torch

    for step in (100, 200):
        torch.save(_state(step), directory / f"step-{step}.pt")
        done(f"step-{step}.pt")


def torch_rename(directory: Path) -> None:
    import torch

    for step in range(3):
        torch.save(_state(step), directory / "last.pt.tmp")
        os.replace(directory / "last.pt.tmp", directory / "last.pt")
        done("last.pt")


def torch_legacy(directory: Path) -> None:
    import torch

    for step in range(2):
        torch.save(_state(step), directory / "old.pt", _use_new_zipfile_serialization=False)
        done("old.pt")


def torch_dcp(directory: Path) -> None:
    import torch.distributed.checkpoint as dcp

    for step in (1, 2):
        dcp.save(_state(step)["model"], checkpoint_id=directory / f"step-{step}", no_dist=True)
        done(f"step-{step}")


def safetensors(directory: Path) -> None:
    from safetensors.torch import save_file

    for step, name in enumerate(["model.safetensors", "model.safetensors", "step-2.safetensors"]):
        save_file(_state(step)["model"], directory / name)
        done(name)


def numpy(directory: Path) -> None:
    import numpy as np

    for step in range(2):
        values = np.random.default_rng(step).random((20, 20))
        np.savez(directory / f"state-{step}.npz", values=values, step=step)
        done(f"state-{step}.npz")
        np.savez_compressed(directory / "last.npz", values=values, step=step)
        done("last.npz")
        np.save(directory / "values.npy", values)
        done("values.npy")


def plain(directory: Path) -> None:
    """What scripts without a library do."""
    for step in range(2):
        with open(directory / "state.pkl", "wb") as file:
            pickle.dump({"step": step, "weights": [float(i) * step for i in range(3000)]}, file)
        done("state.pkl")
        with open(directory / "raw.bin.tmp", "wb") as file:
            file.write(os.urandom(3000))
        os.rename(directory / "raw.bin.tmp", directory / "raw.bin")
        done("raw.bin")
        with open(directory / "weights.dat", "wb", buffering=1024) as file:
            file.write(bytes(500) + os.urandom(500))
            file.write(os.urandom(3000))
        done("weights.dat")


def _keras_model() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    return model


def _keras_fit(*callbacks: Any) -> None:
    import numpy as np

    model = _keras_model()
    values = np.random.default_rng(1).random((16, 4))
    model.fit(values, values.sum(axis=1), epochs=2, verbose=0, callbacks=list(callbacks))


def _after_epoch(name: str) -> Any:
    import keras

    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: done(name.format(epoch=epoch + 1)))


def keras_zip(directory: Path) -> None:
    import keras

    name = "model-{epoch:02d}.keras"
    _keras_fit(keras.callbacks.ModelCheckpoint(str(directory / name)), _after_epoch(name))
    for _ in range(2):
        _keras_model().save(directory / "last.keras")
        done("last.keras")


def keras_h5(directory: Path) -> None:
    name = "best.h5"
    model = _keras_model()
    for _ in range(2):
        model.save(directory / name)
        done(name)
        model.set_weights([weight * 2 + 1 for weight in model.get_weights()])


def keras_weights(directory: Path) -> None:
    import keras

    name = "epoch-{epoch:02d}.weights.h5"
    _keras_fit(
        keras.callbacks.ModelCheckpoint(str(directory / name), save_weights_only=True), _after_epoch(name)
    )
    model = _keras_model()
    for _ in range(2):
        model.save_weights(directory / "last.weights.h5")
        done("last.weights.h5")
        model.set_weights([weight * 2 + 1 for weight in model.get_weights()])


def h5py_in_place(directory: Path) -> None:
    import h5py
    import numpy as np

    for step in range(2):
        with h5py.File(directory / "state.h5", "w") as file:
            for layer in range(4):
                file.create_dataset(
                    f"layer{layer}/weights", data=np.random.default_rng(step).random((12, 12))
                )
                file.flush()
            file.attrs["step"] = step
        done("state.h5")


def tensorflow(directory: Path) -> None:
    import tensorflow as tf

    step, weights = tf.Variable(0), tf.Variable(tf.random.stateless_uniform((8, 8), (1, 2)))
    checkpoint = tf.train.Checkpoint(step=step, weights=weights)
    manager = tf.train.CheckpointManager(checkpoint, str(directory), max_to_keep=2)
    for number in range(1, 4):
        step.assign_add(1)
        weights.assign(weights * 2)
        manager.save()
        done(f"ckpt-{number}")


def lightning(directory: Path) -> None:
    import lightning as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Marking(ModelCheckpoint):
        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            super()._save_checkpoint(trainer, filepath)
            done(Path(filepath).name)

    class Tiny(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.layer(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    pl.seed_everything(1)
    callback = Marking(directory, filename="{epoch}-{step}", monitor="loss", save_top_k=2, save_last=True)
    trainer = pl.Trainer(
        max_epochs=3, callbacks=[callback], accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Tiny(), torch.utils.data.DataLoader(torch.rand(8, 4), batch_size=4))


def lightning_across(directory: Path) -> None:
    """Lightning writes to a temporary file and moves it; from another disk that is a copy."""
    lightning(directory)


def hf_trainer(directory: Path) -> None:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

    class Tiny(PreTrainedModel):
        config_class = PretrainedConfig
        all_tied_weights_keys: dict[str, str] = {}

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layer = torch.nn.Linear(4, 1)
            self.post_init()

        def forward(self, values: Any, labels: Any = None) -> Any:
            loss = (self.layer(values).squeeze(-1) - labels).square().mean()
            return {"loss": loss, "logits": loss}

    class Marking(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            done(f"checkpoint-{state.global_step}")

    data = [{"values": torch.rand(4), "labels": torch.rand(())} for _ in range(16)]
    arguments = TrainingArguments(
        str(directory), per_device_train_batch_size=4, save_steps=2, max_steps=4, logging_steps=100,
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    Trainer(Tiny(PretrainedConfig()), arguments, train_dataset=data, callbacks=[Marking()]).train()


def orbax(directory: Path) -> None:
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        for step in (1, 2):
            checkpointer.save(directory / f"step-{step}", {"weights": jnp.ones((4, 4)) * step, "step": step})
            checkpointer.wait_until_finished()
            done(f"step-{step}")


WRITERS: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        torch_in_place, torch_steps, torch_rename, torch_legacy, torch_dcp, safetensors, numpy, plain, keras_zip,
        keras_h5, keras_weights, h5py_in_place, tensorflow, lightning,
        lightning_across, hf_trainer, orbax,
    )
} | model_writers.WRITERS  # fmt: skip

if __name__ == "__main__":
    WRITERS[sys.argv[1]](Path(sys.argv[2]))
