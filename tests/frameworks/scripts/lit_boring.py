"""Lightning's own smallest model, through the older package, with validation and two processes on one node."""

from pytorch_lightning import Trainer
from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel

trainer = Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, limit_train_batches=8, limit_val_batches=2,
    enable_progress_bar=False, enable_checkpointing=False, logger=False,
)  # fmt: skip
model = BoringModel()
trainer.fit(model, datamodule=BoringDataModule())
trainer.test(model, datamodule=BoringDataModule(), verbose=False)
print(f"boring: rank {trainer.global_rank} of {trainer.world_size} at step {trainer.global_step}", flush=True)
