"""``{checkpoint}`` and ``{checkpoint_step}`` in a script's arguments.

====================================  ==========================  =========================
argument                              with a checkpoint           without one
====================================  ==========================  =========================
``--resume={checkpoint}``             ``--resume=/ck/step_120``   dropped
``--resume {checkpoint}``             ``--resume /ck/step_120``   both dropped
``--resume {checkpoint}/model.pt``    the path put in             both dropped
``ckpt={checkpoint}``                 ``ckpt=/ck/step_120``       dropped
``{{checkpoint}}``                    ``{checkpoint}``            ``{checkpoint}``
``{lr}``, ``{}``, ``{"a": 1}``        unchanged                   unchanged
====================================  ==========================  =========================

An argument that begins with a placeholder is taken for the value of the option before it: an
argument that starts with ``-`` and has no ``=`` (and is not ``-``, ``--`` or a negative number).
After a flag that takes no value, write the argument as ``--resume={checkpoint}``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from elaunch.checkpoint.records import Checkpoint

_PLACEHOLDER = re.compile(
    r"\{\{(?:checkpoint|checkpoint_step)\}\}|\{(checkpoint|checkpoint_step)\}"
)
_NEGATIVE = re.compile(r"-\.?[0-9]")


def has_placeholder(args: Sequence[str]) -> bool:
    """Tell whether any argument asks for the checkpoint."""
    return any(_asks(arg) for arg in args)


def fill_placeholders(args: Sequence[str], checkpoint: Checkpoint | None) -> tuple[str, ...]:
    """Return the arguments with the placeholders filled, or dropped without a checkpoint."""
    filled: list[str] = []
    for position, arg in enumerate(args):
        if checkpoint is None and _asks(arg):
            option = args[position - 1] if position else ""
            if _begins_with_placeholder(arg) and _takes_value(option) and not _asks(option):
                filled.pop()
            continue
        filled.append(_fill(arg, checkpoint))
    return tuple(filled)


def _asks(arg: str) -> bool:
    return any(match[1] for match in _PLACEHOLDER.finditer(arg))


def _begins_with_placeholder(arg: str) -> bool:
    match = _PLACEHOLDER.match(arg)
    return match is not None and match[1] is not None


def _takes_value(option: str) -> bool:
    if not option.startswith("-") or option in ("-", "--") or "=" in option:
        return False
    return _NEGATIVE.match(option) is None


def _fill(arg: str, checkpoint: Checkpoint | None) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] is None or checkpoint is None:
            return match[0][1:-1]
        return str(checkpoint.path if match[1] == "checkpoint" else checkpoint.step)

    return _PLACEHOLDER.sub(value, arg)
