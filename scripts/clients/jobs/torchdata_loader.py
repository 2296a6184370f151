"""torchdata's StatefulDataLoader: its state is saved with the model, in the middle of an epoch."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

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
    parser.add_argument("--dir", default=".")
    parser.add_argument("--resume")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(20, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = Numbers(400)
    sampler = StatefulDistributedSampler(dataset)
    loader = StatefulDataLoader(dataset, batch_size=4, sampler=sampler, num_workers=1)

    step = starting_epoch = 0
    if args.resume:
        saved = torch.load(args.resume, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loaders"][rank])
        step, starting_epoch = saved["step"], saved["epoch"]
    if rank == 0:
        print(f"begin: step {step}")

    for epoch in range(starting_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for source, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(source), targets).backward()
            optimizer.step()
            step += 1
            if step % 10 == 0 and step % 50:
                loaders = [None] * world_size
                dist.all_gather_object(loaders, loader.state_dict())
                if rank == 0:
                    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    saved |= {"loaders": loaders, "step": step, "epoch": epoch}
                    torch.save(saved, os.path.join(args.dir, f"step_{step}.pt"))

    if rank == 0:
        total = sum(p.double().sum().item() for p in model.parameters())
        print(f"end: step {step} weights {total:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
