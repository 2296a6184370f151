"""What ``torch.load(weights_only=True)`` takes, asked before a file is committed.

It refuses the objects of all classes but torch's, Python's plain ones, and those that the script
has named to ``torch.serialization.add_safe_globals``. A value that it would refuse at a resume is
refused at the save, by its key.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from elaunch.errors import CheckpointError
from elaunch.training.checkpoint.together.guard import guarded

_STYLE: Final = re.compile(r"\x1b\[[0-9;]*m")
_CLASS: Final = re.compile(r"(?:GLOBAL|Unsupported class) ([\w.]+)")
_NO_ROOM_FOR: Final = 200
"""Characters of torch's reason in an error; after them it explains itself at length."""


def check(value: Any, name: str) -> None:
    """Raise CheckpointError, with the key below ``name``, for what would be saved in vain.

    Tensors are taken to be good, and are not copied.
    """
    problem = _problem(value)
    if problem is None:
        return
    members: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        members = list(value.items())
    elif isinstance(value, list | tuple):
        members = list(enumerate(value))
    for key, member in members:
        check(member, f"{name}.{key}" if name else str(key))
    raise CheckpointError(
        f"{name or 'the state'}, a {type(value).__name__}, could not be loaded again: "
        f"{reason(problem)}. Make it a plain value, as float(x), list(x), str(x) or "
        "torch.as_tensor(x) are; or name its class to torch.serialization.add_safe_globals, here "
        "and where it is loaded"
    )


def reason(error: BaseException) -> str:
    """Return in a line why torch does not load something, or does not save it."""
    while isinstance(error, CheckpointError) and error.__cause__ is not None:
        error = error.__cause__
    text = _STYLE.sub("", str(error))
    if isinstance(error, pickle.UnpicklingError):
        if found := _CLASS.search(text):
            return f"torch.load(weights_only=True) refuses {found[1]}"
        text = text.partition("WeightsUnpickler error:")[2] or text
    line = " ".join(text.split())
    return line if len(line) <= _NO_ROOM_FOR else f"{line[:_NO_ROOM_FOR]}…"


def _problem(value: Any) -> Exception | None:
    file = io.BytesIO()

    def there_and_back() -> None:
        torch.save(_without_tensors(value), file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)

    return guarded(there_and_back, "torch")[1]


def _without_tensors(value: Any) -> Any:
    """Return the value with None for each ordinary tensor; in it no other class is lacking."""
    kind = type(value)
    if kind in (torch.Tensor, nn.Parameter) and not vars(value):
        return None
    if kind in (dict, OrderedDict):
        return kind((key, _without_tensors(member)) for key, member in value.items())
    if kind in (list, tuple):
        return kind(_without_tensors(member) for member in value)
    return value
