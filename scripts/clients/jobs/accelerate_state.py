"""Accelerate: ``save_state`` every few steps, ``load_state``, ``skip_first_batches``."""

import argparse
import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset

EPOCHS = 2


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
    parser.add_argument("--output_dir", default=".")
    parser.add_argument("--checkpointing_steps", type=int, default=10)
    parser.add_argument("--resume_from_checkpoint")
    args = parser.parse_args()

    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
    )
    set_seed(42)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50)
    loader = DataLoader(Numbers(400), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    overall_step = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        path = os.path.basename(args.resume_from_checkpoint)
        overall_step = int(path.replace("step_", ""))
    accelerator.print(f"begin: step {overall_step}")

    starting_epoch, resume_step = divmod(overall_step, len(loader))
    for epoch in range(starting_epoch, EPOCHS):
        loader.set_epoch(epoch)
        batches = loader
        if epoch == starting_epoch and resume_step:
            batches = accelerator.skip_first_batches(loader, resume_step)
        for source, targets in batches:
            loss = torch.nn.functional.mse_loss(model(source), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if overall_step % args.checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))

    total = sum(p.double().sum().item() for p in model.parameters())
    accelerator.print(f"end: step {overall_step} weights {total:.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
