"""The state that the checkpoint jobs save: linear layers and Adam, of a given size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

WIDTH = 1024
LAYER_BYTES = 3 * 4 * (WIDTH * WIDTH + WIDTH)  # parameters, exp_avg and exp_avg_sq in float32


class Training:
    """A model, its optimizer after one step (``stepped``), and the copy of a rank's share."""

    def __init__(self, megabytes: int, *, stepped: bool = True) -> None:
        torch.manual_seed(0)
        layers = max(1, round(megabytes * 1e6 / LAYER_BYTES))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), foreach=False)
        if stepped:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._megabytes = megabytes
        self._copy: tuple[torch.Tensor, torch.Tensor] | None = None

    def state(self) -> dict[str, Any]:
        """Return what elaunch saves."""
        return {"model": self.model, "optimizer": self.optimizer}

    def state_dicts(self) -> dict[str, Any]:
        """Return what torch.distributed.checkpoint saves."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def share(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return half of the state's bytes, and as much mapped memory to copy it to."""
        if self._copy is None:
            size = int(self._megabytes * 1e6) // 2
            self._copy = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        return self._copy


def forget_peak() -> None:
    """Have :func:`peak_memory` begin anew with what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return the greatest resident memory that this process has had, in bytes."""
    return _status("VmHWM:")


def resident() -> int:
    """Return the resident memory of this process, in bytes."""
    return _status("VmRSS:")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
