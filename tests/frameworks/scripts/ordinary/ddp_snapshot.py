"""The shape of torch's own tutorials for fault tolerance: rank 0 writes a snapshot, every rank resumes from it."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--snapshot", default="snapshot.pt")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
first = 0
if os.path.exists(args.snapshot):
    snapshot = torch.load(args.snapshot, map_location="cpu")
    model.load_state_dict(snapshot["model"])
    first = snapshot["epochs_run"]
print(f"rank {rank} starts at epoch {first}", flush=True)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for epoch in range(first, args.epochs):
    inputs = torch.randn(16, 4)
    loss = ((ddp(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        torch.save({"model": model.state_dict(), "epochs_run": epoch + 1}, args.snapshot)
    dist.barrier()
    print(f"rank {rank} epoch {epoch} loss {loss.item():.3f}", flush=True)
    time.sleep(0.5)
dist.destroy_process_group()
