"""A worker that calls a function: ``python -m elaunch.torchrun.worker PLACE LOCAL_RANK``.

PLACE is the directory of the call, made by elaunch.torchrun.calls. It holds ``call``, two pickles:
what multiprocessing prepares a spawned process by (path, arguments, the module ``__main__``), and
function and arguments. What the function returns goes to ``PLACE/<round>.<rank>``, as a pickle.

Where the workers are forks of the program that calls, there is no ``call``: they have the function.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from multiprocessing import process, spawn
from pathlib import Path
from string import Template
from typing import Any

from elaunch.errorrecord import record

CALL = "call"


@record
def main() -> None:
    """Do what the module's text says, with this process' arguments."""
    place, local_rank = Path(sys.argv[1]), sys.argv[2]
    function, args = _loaded(place / CALL)
    deliver(function, args, place, local_rank)


def deliver(
    function: Callable[..., object], args: Sequence[object], place: Path, local_rank: str
) -> None:
    """Call ``function`` and leave what it returns at ``place``.

    ``$local_rank`` in texts among the arguments is filled in, as torch does it. A call that ends by
    ``sys.exit(0)`` has returned None. Raises TypeError for a result that cannot be pickled.
    """
    filled = [
        Template(arg).safe_substitute(local_rank=local_rank) if isinstance(arg, str) else arg
        for arg in args
    ]
    try:
        result = function(*filled)
    except SystemExit as ending:
        if ending.code:
            raise
        result = None
    try:
        data = pickle.dumps(result)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        kind = type(result).__qualname__
        raise TypeError(f"the function returned a {kind} that cannot be sent: {error}") from error
    final = place / f"{os.environ['ELAUNCH_ROUND']}.{os.environ['RANK']}"
    written = final.with_suffix(f"{final.suffix}.part")
    written.write_bytes(data)
    written.rename(final)


def _loaded(path: Path) -> tuple[Callable[..., object], Sequence[object]]:
    """Return function and arguments, in a process that is prepared as a spawned one is."""
    if not path.exists():
        raise RuntimeError("the fork of the program that had the function was lost, killed perhaps")
    current: Any = process.current_process()
    # A process that the module ``__main__`` would start while it is imported here is refused.
    current._inheriting = True
    try:
        with path.open("rb") as file:
            spawn.prepare(pickle.load(file))
            function, args = pickle.load(file)
    finally:
        del current._inheriting
    return function, args


if __name__ == "__main__":
    main()
