"""Lightning's Trainer: ModelCheckpoint every few steps, ``ckpt_path`` to resume."""

import argparse
import os
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __init__(self, size):
        self.data = torch.rand(size, 21, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        time.sleep(0.01)
        return self.data[index, :20], self.data[index, 20:]


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(20, 1)

    def on_train_start(self):
        if self.global_rank == 0:
            print(f"begin: step {self.global_step}")

    def training_step(self, batch, batch_idx):
        source, targets = batch
        return torch.nn.functional.mse_loss(self.layer(source), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default=".")
    parser.add_argument("--ckpt_path")
    args = parser.parse_args()

    L.seed_everything(0)
    model = Regression()
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=10,
        callbacks=ModelCheckpoint(dirpath=args.dir, every_n_epochs=1, save_top_k=-1),
        default_root_dir=args.dir,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(
        model, DataLoader(Numbers(80), batch_size=4, shuffle=True), ckpt_path=args.ckpt_path
    )
    if trainer.is_global_zero:
        total = sum(p.double().sum().item() for p in model.parameters())
        print(f"end: step {trainer.global_step} weights {total:.6f}")


if __name__ == "__main__":
    main()
