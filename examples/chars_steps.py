"""Train a small transformer on Python's help texts by ``ctx.train.steps``, character by character.

The text is that of ``help()``, which each Python has: half a million characters. Kill any rank at
any time: the loss of each step, and the digest in the last line, keep their bits::

    elaunch run --nproc-per-node 4 --max-restarts 99 --checkpoint-dir ckpt examples/chars_steps.py
    python examples/chars_steps.py

Another version of Python has other help texts, and so other bits.
"""

from __future__ import annotations

import argparse
import hashlib
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import elaunch

LETTERS = 128  # ASCII; any other character counts as the last one
LENGTH = 64
WIDTH = 96


class Lines(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of the text: ``LENGTH`` characters, and for each the one that follows it."""

    def __init__(self) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self.text = torch.tensor([min(ord(letter), LETTERS - 1) for letter in text])

    def __len__(self) -> int:
        """Return the number of pieces."""
        return (len(self.text) - 1) // LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a piece, and the same one character later."""
        piece = self.text[index * LENGTH :][: LENGTH + 1]
        return piece[:-1], piece[1:]


class Transformer(nn.Module):
    """Two layers, four heads, some 250,000 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), False)
        self.out = nn.Linear(WIDTH, LETTERS)

    def forward(self, x: Tensor) -> Tensor:
        """Return for each character the logits of the next one."""
        length = x.shape[1]
        hidden = self.letters(x) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.out(self.layers(hidden, mask, is_causal=True))


@torch.no_grad()
def write(model: nn.Module, text: str, count: int) -> str:
    """Return the text with ``count`` characters that the model puts behind it."""
    model.eval()
    letters = [ord(letter) for letter in text]
    for _ in range(count):
        logits = model(torch.tensor([letters[-LENGTH:]]))[0, -1]
        letters.append(int(torch.multinomial((logits / 0.7).softmax(0), 1)))
    return "".join(map(chr, letters))


def main() -> None:
    """Train for some steps; every rank calls it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, help="steps; by default as often as loses least")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    with elaunch.init(name="chars_steps") as ctx:
        rank = ctx.distributed.rank
        loop = ctx.train.steps(
            {"model": model, "optimizer": optimizer, "schedule": schedule},
            Lines(),
            global_batch=48,
            micro_batch=4,
            until=args.steps,
            save_every=args.save_every or "auto",
        )
        if rank == 0 and loop.done:
            print(f"goes on after step {loop.done}", flush=True)
        for step in loop:
            for x, y in step.micro_batches():
                step.backward(cross_entropy(model(x).flatten(0, 1), y.flatten()))
            step.apply(optimizer, clip=1.0)
            schedule.step()
            if rank == 0 and step.number % 20 == 0:
                print(f"step {step.number}: loss {step.loss:.4f}", flush=True)
        if rank == 0 and not loop.preempted:
            print(write(model, "The ", 200))
            weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
            print(f"{loop.done} steps: {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
