"""Lightning's Fabric: a loop of one's own, ``fabric.save`` and ``fabric.load``."""

import argparse
import os
import time

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Dataset

EPOCHS = 10


class Numbers(Dataset):
    def __init__(self, size):
        self.data = torch.rand(size, 21, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        time.sleep(0.01)
        return self.data[index, :20], self.data[index, 20:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default=".")
    parser.add_argument("--resume")
    args = parser.parse_args()

    fabric = Fabric(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    )
    fabric.launch()
    fabric.seed_everything(0)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(Numbers(80), batch_size=4))

    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if args.resume:
        fabric.load(args.resume, state)
    fabric.print(f"begin: step {state['epoch'] * len(loader)}")

    while state["epoch"] < EPOCHS:
        for source, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(source), targets)
            fabric.backward(loss)
            optimizer.step()
        state["epoch"] += 1
        fabric.save(os.path.join(args.dir, f"step={state['epoch'] * len(loader)}.ckpt"), state)

    total = sum(p.double().sum().item() for p in model.parameters())
    fabric.print(f"end: step {state['epoch'] * len(loader)} weights {total:.6f}")


if __name__ == "__main__":
    main()
