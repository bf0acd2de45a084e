"""Dask: the script is the client; other workers repeat the work of a lost one."""

import time

import loop
from distributed import Client

WORKERS = 2


def work(number):
    time.sleep(0.02)
    return number


with Client() as client:
    client.wait_for_workers(WORKERS, timeout=120)
    state = loop.begin()
    while state["step"] < loop.STEPS:
        state["step"] += 1
        numbers = [(rank + 1) * state["step"] for rank in range(WORKERS)]
        state["total"] += sum(client.gather(client.map(work, numbers, pure=False)))
        loop.say(f"step {state['step']} rank 0 of 1")
        loop.keep(state)
        time.sleep(loop.PAUSE)
    while len(client.scheduler_info()["workers"]) < WORKERS:
        time.sleep(0.1)
    names = sorted(str(one["name"]) for one in client.scheduler_info()["workers"].values())
    loop.say(f"finished {state['step']} rank 0 of 1 total {state['total']} with {','.join(names)}")
