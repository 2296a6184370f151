"""DeepSpeed on the CPU: ZeRO stage 1, ``save_checkpoint`` and ``load_checkpoint``."""

import argparse
import time

import deepspeed
import torch
from torch.utils.data import Dataset

STEPS = 100
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


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
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, config=CONFIG, model_parameters=model.parameters(), training_data=Numbers(80)
    )
    engine.load_checkpoint(args.dir)
    rank = torch.distributed.get_rank()
    if rank == 0:
        print(f"begin: step {engine.global_steps}")

    while engine.global_steps < STEPS:
        for source, targets in loader:
            loss = torch.nn.functional.mse_loss(engine(source), targets)
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint(args.dir)

    if rank == 0:
        total = sum(p.double().sum().item() for p in engine.module.parameters())
        print(f"end: step {engine.global_steps} weights {total:.6f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
