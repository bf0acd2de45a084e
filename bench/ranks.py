"""A small data-parallel training on two CPUs: run by path with torch's Python, by Stoker or by torchrun.

    ranks.py DIRECTORY STEPS WIDTH EVERY    every rank records its events in DIRECTORY/events-RANK.csv

Saves every EVERY steps and resumes after a restart; all contenders use the same script.
"""

from __future__ import annotations

import os
import sys
import time

BORN = time.time()
"""Before torch is imported: the start of the process."""

from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402


def main() -> None:
    where, steps = Path(sys.argv[1]), int(sys.argv[2])
    width, every = int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    with (where / f"events-{rank}.csv").open("a", buffering=1) as log:
        log.write(f"born,{BORN:.6f},{os.getpid()}\n")
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        path = Path(os.environ.get("STOKER_CHECKPOINT_DIR") or where / "checkpoints") / "last.pt"
        first = 0
        if path.exists():
            state = torch.load(path, weights_only=True)
            model.module.load_state_dict(state["model"])
            first = state["step"]
        data = torch.randn(256, width)
        for step in range(first, steps):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            log.write(f"step,{time.time():.6f},{step + 1}\n")
            if rank == 0 and (step + 1) % every == 0:
                path.parent.mkdir(exist_ok=True)
                torch.save({"model": model.module.state_dict(), "step": step + 1}, f"{path}.tmp")
                os.replace(f"{path}.tmp", path)
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
