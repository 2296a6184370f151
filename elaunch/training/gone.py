"""Names that the script API had once: an error says what to write instead. None of them works."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final, NoReturn

from elaunch.errors import ContextError

GONE: Final = {
    "from_environment": "write elaunch.init(), which finds the launcher",
    "from_mpi": "write elaunch.init(), which finds the launcher",
    "from_slurm": "write elaunch.init(), which finds the launcher",
    "get_rank": "write .rank",
    "get_size": "write .size",
    "get_local_rank": "write .local_rank",
    "get_local_size": "write .local_size",
    "get_cross_rank": "write .cross_rank",
    "get_num_agents": "write .cross_size",
    "save_ddp": "write save(state, step)",
    "load_ddp": "write load(state), which reads what save_ddp() has written, too",
}
WORDS: Final = {"uuid": "which"}


def refuse_gone(call: str, words: Collection[str]) -> None:
    """Raise ContextError for an argument that has another name now."""
    for word in WORDS.keys() & words:
        raise ContextError(f"{call}({word}=…): write {WORDS[word]}=")


def _gone(owner: type, name: str) -> AttributeError:
    instead = f": {GONE[name]}" if name in GONE else ""
    return AttributeError(f"{owner.__name__} has no {name}{instead}", name=name, obj=owner)


# A type checker would take every name for one that is there.
class _Renamed(type):
    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> NoReturn:
            raise _gone(cls, name)


class Renamed(metaclass=_Renamed):
    """A part of the script's context, some of whose names have gone."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise _gone(type(self), name)
