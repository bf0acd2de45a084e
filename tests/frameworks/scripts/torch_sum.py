"""Plain torch: the world comes from the environment."""

import loop
import torch
import torch.distributed as dist

dist.init_process_group("gloo")


def add(number):
    value = torch.tensor([number])
    dist.all_reduce(value)
    return value.item()


loop.train(dist.get_rank(), dist.get_world_size(), add)
dist.destroy_process_group()
