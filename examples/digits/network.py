"""The data and the model: handwritten digits, and a network with one hidden layer in numpy.

Its parameters are one flat vector, because that is what workers send to each other.
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

INPUTS, CLASSES = 64, 10
Data = tuple[np.ndarray, np.ndarray]


def digits() -> tuple[Data, Data]:
    """1,347 images to train on and 450 to test with; the same in every worker."""
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16.0, y, test_size=0.25, random_state=0, stratify=y)
    return (parts[0], parts[2]), (parts[1], parts[3])


def fresh(hidden: int = 256) -> np.ndarray:
    """Random weights; the same in every worker, so that they need not be sent."""
    rng = np.random.default_rng(0)
    w1 = rng.normal(0, 0.2, (INPUTS, hidden))
    w2 = rng.normal(0, 0.1, (hidden, CLASSES))
    return np.concatenate([w1.ravel(), np.zeros(hidden), w2.ravel(), np.zeros(CLASSES)])


def gradient(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float]:
    """Both are summed over the examples: sums of several workers add up to the whole."""
    _, _, w2, _ = _layers(weights)
    hidden, probabilities = _forward(weights, x)
    rows = np.arange(len(x))
    loss = float(-np.log(probabilities[rows, y] + 1e-9).sum())
    delta = probabilities
    delta[rows, y] -= 1
    back = (delta @ w2.T) * (hidden > 0)
    parts = [(x.T @ back).ravel(), back.sum(0), (hidden.T @ delta).ravel(), delta.sum(0)]
    return np.concatenate(parts), loss


def accuracy(weights: np.ndarray, data: Data) -> float:
    x, y = data
    return float((_forward(weights, x)[1].argmax(1) == y).mean())


def _forward(weights: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    w1, b1, w2, b2 = _layers(weights)
    hidden = np.maximum(0, x @ w1 + b1)
    logits = hidden @ w2 + b2
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return hidden, exponentials / exponentials.sum(1, keepdims=True)


def _layers(weights: np.ndarray) -> list[np.ndarray]:
    """Views into the vector."""
    hidden = (len(weights) - CLASSES) // (INPUTS + 1 + CLASSES)
    w1, b1, w2, b2 = np.split(weights, np.cumsum([INPUTS * hidden, hidden, hidden * CLASSES]))
    return [w1.reshape(INPUTS, hidden), b1, w2.reshape(hidden, CLASSES), b2]
