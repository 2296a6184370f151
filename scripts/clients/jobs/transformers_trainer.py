"""Transformers' Trainer with ``--resume_from_checkpoint``; a GPT-2 of two tiny layers."""

import time

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Tokens(Dataset):
    def __init__(self, size):
        self.data = torch.randint(64, (size, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        time.sleep(0.01)
        return {"input_ids": self.data[index], "labels": self.data[index]}


class Begin(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            print(f"begin: step {state.global_step}")


def main():
    (training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(training_args.seed)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    trainer = Trainer(model, training_args, train_dataset=Tokens(400), callbacks=[Begin()])
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    if trainer.is_world_process_zero():
        total = sum(p.double().abs().sum().item() for p in model.parameters())
        print(f"end: step {trainer.state.global_step} weights {total:.6f}")


if __name__ == "__main__":
    main()
