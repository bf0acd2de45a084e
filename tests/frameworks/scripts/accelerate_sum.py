"""accelerate: in the way `accelerate launch` starts it."""

import loop
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)


def add(number):
    return accelerator.reduce(torch.tensor([number]), "sum").item()


loop.train(accelerator.process_index, accelerator.num_processes, add)
accelerator.end_training()
