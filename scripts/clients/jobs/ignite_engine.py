"""Ignite: an Engine below ``idist.Parallel``, a Checkpoint handler, ``load_objects`` to resume."""

import argparse
import time

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch.utils.data import Dataset


class Numbers(Dataset):
    def __init__(self, size):
        self.data = torch.rand(size, 21, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        time.sleep(0.01)
        return self.data[index, :20], self.data[index, 20:]


def training(local_rank, args):
    torch.manual_seed(0)
    loader = idist.auto_dataloader(Numbers(80), batch_size=8, shuffle=True)
    model = idist.auto_model(torch.nn.Linear(20, 1))
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def step(engine, batch):
        source, targets = batch
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(source), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(step)

    @trainer.on(Events.EPOCH_STARTED)
    def set_epoch():
        loader.sampler.set_epoch(trainer.state.epoch)

    objects = {"trainer": trainer, "model": model, "optimizer": optimizer}
    saver = DiskSaver(args.dir, require_empty=False)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(objects, saver, n_saved=None))
    if args.resume:
        Checkpoint.load_objects(objects, torch.load(args.resume))

    @trainer.on(Events.STARTED)
    def begin():
        if idist.get_rank() == 0:
            print(f"begin: step {trainer.state.iteration}")

    trainer.run(loader, max_epochs=10)
    if idist.get_rank() == 0:
        total = sum(p.double().sum().item() for p in model.parameters())
        print(f"end: step {trainer.state.iteration} weights {total:.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default=".")
    parser.add_argument("--resume")
    args = parser.parse_args()
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training, args)
