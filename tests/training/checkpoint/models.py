"""Models, and their states as bytes that can be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def network(seed: int = 0) -> nn.Sequential:
    """Return a small network with buffers; another seed, other parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def plain(seed: int = 0) -> nn.Sequential:
    """Return a small network without buffers; its sizes are no multiples of the ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 7, bias=False))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """Make some steps, the same on all ranks."""
    for step in range(steps):
        inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()


def bits(value: Any) -> Any:
    """Return nested dicts and lists with tensors as bytes; sharded ones are gathered."""
    if isinstance(value, dict):
        return {key: bits(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [bits(member) for member in value]
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        raw = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        return (str(value.dtype), tuple(value.shape), bytes(raw.tolist()))
    return value
