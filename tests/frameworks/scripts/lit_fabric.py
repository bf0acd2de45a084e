"""Fabric: the loop is the user's, the devices are Lightning's."""

import torch
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(7)
model = torch.nn.Linear(8, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(10):
    optimizer.zero_grad()
    loss = model(torch.full((4, 8), float(fabric.global_rank))).square().mean()
    fabric.backward(loss)
    optimizer.step()
weights = fabric.all_gather(model.weight.detach()).flatten(1)
same = bool((weights == weights[0]).all())
ranks = sorted(fabric.all_gather(torch.tensor(fabric.global_rank)).tolist())
print(
    f"fabric: rank {fabric.global_rank} of {fabric.world_size}, ranks {ranks}, same weights {same}",
    flush=True,
)
fabric.barrier()
torch.distributed.destroy_process_group()
