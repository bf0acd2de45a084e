"""The checkpoint contract without any import from Stoker: a directory and an environment variable."""

import os
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

STEPS = int(os.environ.get("STEPS", "20"))

directory = Path(os.environ.get("STOKER_CHECKPOINT_DIR", "checkpoints"))
directory.mkdir(exist_ok=True)
x, y = load_digits(return_X_y=True)
x = x / 16.0
model = SGDClassifier(random_state=0, learning_rate="constant", eta0=0.01)
model.partial_fit(x[:1], y[:1], classes=np.arange(10))

first = 0
if "STOKER_RESUME_FROM" in os.environ:
    with np.load(os.environ["STOKER_RESUME_FROM"]) as saved:
        model.coef_, model.intercept_, first = saved["coef"], saved["intercept"], int(saved["step"]) + 1
    print(f"resumed at step {first}", flush=True)

for step in range(first, STEPS):
    model.partial_fit(x[:1400], y[:1400])
    with open(directory / "last.npz.tmp", "wb") as file:
        np.savez(file, coef=model.coef_, intercept=model.intercept_, step=step)
    os.replace(directory / "last.npz.tmp", directory / "last.npz")
    print(f"step {step} accuracy {model.score(x[1400:], y[1400:]):.4f}", flush=True)
    time.sleep(float(os.environ.get("PACE", "0")))
