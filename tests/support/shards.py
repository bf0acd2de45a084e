"""A training in which every rank writes its own part of a checkpoint and prints what it found."""

from __future__ import annotations

import os
import sys
import time

import stoker


def main() -> None:
    steps, pause, size = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    rank, directory = int(os.environ["STOKER_RANK"]), os.environ["STOKER_CHECKPOINT_DIR"]
    first = 0
    if resume := os.environ.get("STOKER_RESUME_FROM"):
        found = {name: _read(f"{resume}/{name}") for name in sorted(os.listdir(resume))}
        print(f"found rank={rank} {' '.join(f'{name}={text}' for name, text in found.items())}", flush=True)
        first = int(found[f"rank{rank}.txt"]) + 1
    print(f"pid {os.getpid()}", flush=True)
    for step in range(first, steps):
        stoker.report(step=step, loss=rank + 1.0 / (step + 1))
        part = f"{directory}/step-{step}.tmp"
        os.makedirs(part)
        with open(f"{part}/rank{rank}.txt", "w") as file:
            file.write(str(step))
            file.truncate(max(size, file.tell()))
        os.rename(part, f"{directory}/step-{step}")
        time.sleep(pause)
    with open(f"{os.environ['STOKER_OUTPUT_DIR']}/rank.txt", "w") as file:
        file.write(str(rank))
    print(f"done rank={rank}", flush=True)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read(16).strip("\0")


if __name__ == "__main__":
    main()
