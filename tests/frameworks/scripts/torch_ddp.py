"""DistributedDataParallel: the ranks' numbers are gradients, which it averages."""

import loop
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
weight = model.module.weight


def add(number):
    model.zero_grad()
    model(torch.tensor([[float(number)]])).sum().backward()
    return round(weight.grad.item() * dist.get_world_size())


loop.train(dist.get_rank(), dist.get_world_size(), add)
dist.destroy_process_group()
