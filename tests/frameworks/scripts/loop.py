"""A minimal training: in each step all ranks add their numbers. The total shows repeated or lost steps.

Shared by the scripts of this folder. Rank 0 saves its state after each step, and a restarted script resumes
from it.
"""

import json
import os
import socket
import sys
import time

import stoker

STEPS = int(os.environ.get("STEPS", "40"))
PAUSE = float(os.environ.get("PAUSE", "0.1"))
if os.environ["STOKER_GENERATION"] != "1":
    # By now a task was lost in the middle of the training.
    PAUSE = min(PAUSE, 0.1)


def say(text):
    # One write, so that the lines of several ranks do not mix.
    origin = f"generation {os.environ['STOKER_GENERATION']} pid {os.getpid()} on {socket.gethostname()}"
    sys.stdout.write(f"{text} | {origin}\n")
    sys.stdout.flush()


def begin():
    kept = stoker.checkpoint.load("state.json")
    return json.loads(kept) if kept else {"step": 0, "total": 0}


def keep(state):
    stoker.checkpoint.save("state.json", json.dumps(state), step=state["step"])


def train(rank, world, add):
    """`add(number)` returns the sum of all ranks' numbers."""
    state = begin()
    while state["step"] < STEPS:
        state["step"] += 1
        state["total"] += int(add((rank + 1) * state["step"]))
        say(f"step {state['step']} rank {rank} of {world}")
        if rank == 0:
            keep(state)
        time.sleep(PAUSE)
    say(f"finished {state['step']} rank {rank} of {world} total {state['total']}")
