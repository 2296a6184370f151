"""What a search for checkpoints returns: plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    ``format`` is ``elaunch``, ``dcp``, ``huggingface``, ``lightning``, ``torch.save`` or
    ``safetensors``; ``round`` is known for elaunch's own layout only.
    """

    path: Path
    step: int
    format: str
    round: int | None = None


@dataclass(frozen=True)
class PassedOver:
    """Something that looks like a checkpoint and was not taken, with the reason in words."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Search:
    """The newest complete checkpoint, if any, and what was passed over on the way to it."""

    checkpoint: Checkpoint | None
    passed_over: tuple[PassedOver, ...] = ()
