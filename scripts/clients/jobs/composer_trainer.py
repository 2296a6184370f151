"""Composer: a Trainer that saves every few batches, ``load_path`` to resume."""

import argparse
import os
import time

import torch
from composer import Callback, Trainer
from composer.models import ComposerModel
from composer.utils import dist
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __init__(self, size):
        self.data = torch.rand(size, 21, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        time.sleep(0.01)
        return self.data[index, :20], self.data[index, 20:]


class Regression(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(20, 1)

    def forward(self, batch):
        return self.layer(batch[0])

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])


class Begin(Callback):
    def fit_start(self, state, logger):
        if dist.get_global_rank() == 0:
            print(f"begin: step {state.timestamp.batch.value}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default=".")
    parser.add_argument("--load_path")
    args = parser.parse_args()

    # Composer asks for it when it loads; torchrun gives the same under another name.
    os.environ.setdefault("NODE_RANK", os.environ["GROUP_RANK"])
    dist.initialize_dist("cpu")
    torch.manual_seed(0)
    model = Regression()
    numbers = Numbers(80)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(
            numbers, batch_size=4, sampler=dist.get_sampler(numbers, shuffle=True)
        ),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        max_duration="10ep",
        device="cpu",
        seed=0,
        callbacks=[Begin()],
        progress_bar=False,
        save_folder=args.dir,
        save_interval="10ba",
        save_overwrite=True,  # else what a kill has left half written is in the way for ever
        load_path=args.load_path,
    )
    trainer.fit()
    if dist.get_global_rank() == 0:
        total = sum(p.double().sum().item() for p in model.parameters())
        print(f"end: step {trainer.state.timestamp.batch.value} weights {total:.6f}")
    trainer.close()


if __name__ == "__main__":
    main()
