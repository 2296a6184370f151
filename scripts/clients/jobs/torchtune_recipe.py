"""torchtune's recipe ``full_finetune_distributed``, with a tiny model of its own and a dataset."""

import runpy
import sys
import time
from pathlib import Path

import torch
import torchtune
from torch.utils.data import Dataset
from torchtune import config, training

RECIPES = Path(torchtune.__file__).parent.parent / "recipes"
RECIPE = runpy.run_path(str(RECIPES / "full_finetune_distributed.py"))

# The recipe calls these unasked, and they raise on a CPU.
training.get_memory_stats = lambda device: {}
training.log_memory_stats = lambda stats: None
training.cleanup_before_training = lambda: None


class Tokenizer:
    pad_id = 0


class Sentences(Dataset):
    def __init__(self, tokenizer, size):
        generator = torch.Generator().manual_seed(0)
        self.data = torch.randint(1, 100, (size, 16), generator=generator).tolist()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        time.sleep(0.01)
        return {"tokens": self.data[index], "labels": self.data[index]}


class Recipe(RECIPE["FullFinetuneRecipeDistributed"]):
    def setup(self, cfg):
        base = Path(cfg.checkpointer.checkpoint_dir)
        if self._is_rank_zero and not base.exists():
            torch.manual_seed(0)
            base.mkdir()
            torch.save(config.instantiate(cfg.model).state_dict(), base / "model.pt")
        torch.distributed.barrier()
        super().setup(cfg)

    def train(self):
        if self._is_rank_zero:
            print(f"begin: step {self.global_step}")
        super().train()
        total = sum(p.full_tensor().double().sum().item() for p in self._model.parameters())
        if self._is_rank_zero:
            print(f"end: step {self.global_step} weights {total:.6f}")


@config.parse
def main(cfg):
    recipe = Recipe(cfg=cfg)
    recipe.setup(cfg=cfg)
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    sys.exit(main())
