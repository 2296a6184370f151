"""Values that each rank keeps for itself: random states, the position in its data.

A value that all ranks save under one key is stored once. ``PerRank`` marks what is not the same on
all of them: each rank's is stored, under ``key.rank-00003``, and each gets its own back. Of more
ranks, rank r gets that of rank ``r % (number of ranks that saved)``, or keeps what it has; fewer
are an error, or leave some out; or each gets what ``on_resize`` makes of all of them.
"""

from __future__ import annotations

import array
import random
import re
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch

from elaunch.errors import ContextError
from elaunch.training.checkpoint.state import tensors

_RANK = re.compile(r"rank-([0-9]{5,})")


def rank_name(rank: int) -> str:
    """Return the part of a key that says whose it is."""
    return f"rank-{rank:05d}"


def parse_rank_name(name: str) -> int | None:
    """Return the rank in what :func:`rank_name` made, None for any other name."""
    match = _RANK.fullmatch(name)
    return int(match[1]) if match else None


class PerRank:
    """Marks, in the state of ``ctx.checkpoint.save`` and ``load``, what each rank has of its own.

    Args:
        value: anything that could stand in the state without the mark: a plain value, a tensor, a
            dict, a module, an object with ``state_dict`` and ``load_state_dict``.
        on_more_ranks: what rank r gets if only ``saved`` <= r ranks have saved: "wrap", that of
            rank ``r % saved``; "keep", the value that it has.
        on_fewer_ranks: what happens if more ranks have saved than load: "error", the load is
            refused; "drop", what those beyond had is left out.
        on_resize: called by ``load`` if another number of ranks has saved, with what each of them
            had, in the order of the ranks; returns what this rank takes. Refused for modules,
            optimizers and dicts with them, which are loaded in place.

    ``load`` puts what was saved into ``value``, or hands it to the object's
    ``load_state_dict``.
    """

    def __init__(
        self,
        value: Any,
        *,
        on_more_ranks: Literal["wrap", "keep"] = "wrap",
        on_fewer_ranks: Literal["error", "drop"] = "error",
        on_resize: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if on_more_ranks not in ("wrap", "keep"):
            raise ContextError(f'PerRank(on_more_ranks={on_more_ranks!r}): give "wrap" or "keep"')
        if on_fewer_ranks not in ("error", "drop"):
            raise ContextError(
                f'PerRank(on_fewer_ranks={on_fewer_ranks!r}): give "error" or "drop"'
            )
        self.value = value
        self.on_more_ranks = on_more_ranks
        self.on_fewer_ranks = on_fewer_ranks
        self.on_resize = on_resize

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class RandomState:
    """The random generators of this process, as an object with ``state_dict``.

    Those of Python and torch; of numpy if it is imported; of CUDA if it is initialised.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return their states, as bytes: those have the same length every time."""
        version, internal, gauss = random.getstate()
        state: dict[str, Any] = {
            "torch": _bytes(torch.get_rng_state()),
            "python": array.array("Q", internal).tobytes(),
            "python_more": (version, gauss),
        }
        if (numpy := sys.modules.get("numpy")) is not None:
            name, keys, *more = numpy.random.get_state()
            state["numpy"] = keys.tobytes()
            state["numpy_more"] = (str(name), *more)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = _bytes(torch.cuda.get_rng_state())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators to ``state``; those that it does not know stay as they are."""
        torch.set_rng_state(_tensor(state["torch"]))
        version, gauss = state["python_more"]
        random.setstate((version, tuple(array.array("Q", state["python"])), gauss))
        if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
            name, *more = state["numpy_more"]
            keys = numpy.frombuffer(state["numpy"], dtype="uint32")
            numpy.random.set_state((name, keys, *more))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(tensors.memory_of(state))


def _tensor(state: bytes) -> torch.Tensor:
    return tensors.over(bytearray(state))


def rng_state() -> PerRank:
    """Return this process's random generators, to be put into the state of a checkpoint.

    As in ``ctx.checkpoint.save({"model": model, "rng": elaunch.rng_state()}, step)``. Each rank
    gets its own back; a rank that there was not at the save keeps the states that it has: two ranks
    with one state would draw the same numbers.
    """
    return PerRank(RandomState(), on_more_ranks="keep", on_fewer_ranks="drop")
