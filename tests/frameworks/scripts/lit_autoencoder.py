"""The autoencoder of Lightning's README, unaware of Stoker."""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 64))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, *arguments):
        print(
            f"global step {self.trainer.global_step} on rank {self.global_rank} of {self.trainer.world_size}",
            flush=True,
        )

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--num-nodes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    L.seed_everything(7)
    data = DataLoader(TensorDataset(torch.randn(4096, 64)), batch_size=4)
    saving = ModelCheckpoint(dirpath=args.checkpoints, save_last=True, every_n_train_steps=1)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=args.devices,
        num_nodes=args.num_nodes,
        max_steps=args.steps,
        callbacks=[saving],
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(LitAutoEncoder(), data, ckpt_path="last")
    print(f"done at step {trainer.global_step} of {trainer.world_size}", flush=True)
