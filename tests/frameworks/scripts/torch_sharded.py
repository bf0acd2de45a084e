"""FSDP: every rank saves its own part with `stoker.checkpoint.save_sharded`, in its own task's directory."""

import os
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import stoker

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 2))
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(model.parameters())
origin = f"generation {os.environ['STOKER_GENERATION']} pid {os.getpid()} on {socket.gethostname()}"


def state(step):
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "step": step}


def train(step):
    optimizer.zero_grad()
    torch.manual_seed(step)
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()


def total():
    return sum(part.full_tensor().double().sum().item() for part in model.parameters())


first = 0
found = state(0)
if stoker.checkpoint.load_sharded(found):
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    first = found["step"]
    print(f"found step={first} rank={rank} total={total():.9f}", flush=True)
for step in range(first + 1, int(sys.argv[1]) + 1):
    train(step)
    stoker.checkpoint.save_sharded(state(step), step=step, keep=2)
    print(f"saved step={step} rank={rank} total={total():.9f}", flush=True)
    print(f"step {step} rank {rank} of {world} | {origin}", flush=True)
    time.sleep(0.3)
stoker.checkpoint.wait()
dist.barrier()
dist.destroy_process_group()
