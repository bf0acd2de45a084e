"""A training in small: in each step all ranks add their numbers, and the sum of the sums shows every step exactly once.

Shared by the scripts of this folder. Rank 0 keeps where it is after each step; whoever starts goes on from there.
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
    # There was time enough to lose somebody in the middle.
    PAUSE = min(PAUSE, 0.1)


def say(text):
    # One write: the lines of several ranks are mixed by whoever brings them here.
    who = f"generation {os.environ['STOKER_GENERATION']} pid {os.getpid()} on {socket.gethostname()}"
    sys.stdout.write(f"{text} | {who}\n")
    sys.stdout.flush()


def begin():
    kept = stoker.checkpoint.load("state.json")
    return json.loads(kept) if kept else {"step": 0, "total": 0}


def keep(state):
    stoker.checkpoint.save("state.json", json.dumps(state), step=state["step"])


def train(rank, world, add):
    """`add(number)`: the sum of all ranks' numbers."""
    state = begin()
    while state["step"] < STEPS:
        state["step"] += 1
        state["total"] += int(add((rank + 1) * state["step"]))
        say(f"step {state['step']} rank {rank} of {world}")
        if rank == 0:
            keep(state)
        time.sleep(PAUSE)
    say(f"finished {state['step']} rank {rank} of {world} total {state['total']}")
