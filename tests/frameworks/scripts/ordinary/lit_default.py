"""A Lightning script with its defaults: logs and checkpoints go to lightning_logs/ in the working folder."""

import glob
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = ((self.layer(inputs) - targets) ** 2).mean()
        self.log("loss", loss)
        return loss

    def on_train_epoch_start(self):
        print("epoch", self.current_epoch, flush=True)
        time.sleep(0.5)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


torch.manual_seed(0)
data = torch.randn(64, 8)
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=8)
trainer = L.Trainer(
    max_epochs=8,
    accelerator="cpu",
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint(save_last=True)],
    log_every_n_steps=1,
)
found = sorted(glob.glob("lightning_logs/version_*/checkpoints/last.ckpt"))
trainer.fit(Model(), loader, ckpt_path=found[-1] if found else None)
