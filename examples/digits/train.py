"""Train a small neural network on real handwritten digits (1,797 images that ship with scikit-learn).

Runs anywhere: `python train.py`. Under Stoker it reports its curve, goes on from its newest checkpoint after a
crash, stops politely when asked, and leaves its model as the run's output.
"""

import argparse
import io
import os
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import stoker


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.15)
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args()

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        x / 16.0, y, test_size=0.25, random_state=0, stratify=y
    )
    model, first = load(args.hidden)

    for epoch in range(first, args.epochs):
        loss = train_epoch(model, x_train, y_train, args.lr, np.random.default_rng(epoch))
        accuracy = float((forward(model, x_test)[1].argmax(1) == y_test).mean())
        stoker.report(step=epoch, loss=loss, accuracy=accuracy)
        save(model, epoch)
        print(f"epoch {epoch + 1:3d}/{args.epochs}  loss {loss:.4f}  accuracy {accuracy:.4f}")
        if stoker.should_stop():
            print("asked to stop; the checkpoint is written")
            return

    output = Path(os.environ.get("STOKER_OUTPUT_DIR", "."))
    np.savez(output / "model.npz", **model)
    print(f"final accuracy {accuracy:.4f}")


def load(hidden: int) -> tuple[dict[str, np.ndarray], int]:
    """The newest checkpoint, or fresh weights."""
    data = stoker.checkpoint.load()
    if data is not None:
        with np.load(io.BytesIO(data)) as saved:
            model = {name: saved[name] for name in saved.files}
        epoch = int(model.pop("epoch"))
        print(f"going on after epoch {epoch + 1}")
        return model, epoch + 1
    rng = np.random.default_rng(0)
    return {
        "w1": rng.normal(0, 0.2, (64, hidden)),
        "b1": np.zeros(hidden),
        "w2": rng.normal(0, 0.1, (hidden, 10)),
        "b2": np.zeros(10),
    }, 0


def save(model: dict[str, np.ndarray], epoch: int) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, epoch=epoch, **model)
    stoker.checkpoint.save("digits.npz", buffer.getvalue(), step=epoch)


def train_epoch(
    model: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray, lr: float, rng: np.random.Generator
) -> float:
    total = 0.0
    for batch in np.array_split(rng.permutation(len(x)), len(x) // 16):
        hidden, probabilities = forward(model, x[batch])
        total += float(-np.log(probabilities[np.arange(len(batch)), y[batch]] + 1e-9).sum())
        delta = probabilities
        delta[np.arange(len(batch)), y[batch]] -= 1
        delta /= len(batch)
        back = (delta @ model["w2"].T) * (hidden > 0)
        model["w2"] -= lr * hidden.T @ delta
        model["b2"] -= lr * delta.sum(0)
        model["w1"] -= lr * x[batch].T @ back
        model["b1"] -= lr * back.sum(0)
    return total / len(x)


def forward(model: dict[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    hidden = np.maximum(0, x @ model["w1"] + model["b1"])
    logits = hidden @ model["w2"] + model["b2"]
    logits -= logits.max(1, keepdims=True)
    exponentials = np.exp(logits)
    return hidden, exponentials / exponentials.sum(1, keepdims=True)


if __name__ == "__main__":
    main()
