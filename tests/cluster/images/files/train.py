"""Fits a line by gradient descent, with checkpoints in Stoker's directory. Standard library only."""

import json
import os
import sys

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
folder = os.environ.get("STOKER_CHECKPOINT_DIR")
state = {"step": 0, "slope": 0.0}
if os.environ.get("STOKER_RESUME_FROM"):
    with open(os.environ["STOKER_RESUME_FROM"]) as file:
        state = json.load(file)
points = [(x / 10, 3 * x / 10) for x in range(10)]
while state["step"] < steps:
    state["step"] += 1
    gradient = sum(2 * x * (state["slope"] * x - y) for x, y in points) / len(points)
    state["slope"] -= 0.5 * gradient
    print(f"step {state['step']} slope {state['slope']:.4f}", flush=True)
    if folder:
        path = os.path.join(folder, f"step-{state['step']:04}.json")
        with open(path + ".tmp", "w") as file:
            json.dump(state, file)
        os.replace(path + ".tmp", path)
print(f"done: {os.environ.get('FLAVOUR', 'plain')}")
