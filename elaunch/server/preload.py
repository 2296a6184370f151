"""Import what the workers will need, once, before they are forked.

Most of it before the first fork. What a worker needs only later (``+module`` in ``--preload``) is
imported when the first round has run undisturbed for a while: the start does not wait for it, a
short job never pays for it, and a restart finds it there. torch itself imports ``torch._dynamo``
when the first optimizer is made, which costs each worker most of a second. While such an import
runs the server hears nothing; an exit in just that second is noticed up to a second late.
"""

from __future__ import annotations

import gc
import importlib
import math
import sys
import time
import traceback
from collections.abc import Sequence

DELAY = 60.0
"""Seconds after the first worker was started at which the later modules are imported."""


def preload(modules: Sequence[str], path: str | None) -> str | None:
    """Import ``modules`` in order; return why that failed or must not be forked, or None.

    ``path`` is what a worker has first on ``sys.path``, if it has anything of its own there.
    """
    if path is not None:
        sys.path.insert(0, path)
    gc.disable()  # an import leaves next to no garbage, and looking for it takes a tenth of torch's
    try:
        return _import(modules)
    finally:
        gc.enable()
        if path is not None and path in sys.path:
            sys.path.remove(path)


def _import(modules: Sequence[str]) -> str | None:
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:  # a module may raise anything, SystemExit included
            last = traceback.format_exception_only(type(error), error)[-1].strip()
            return (
                f"--preload {name}: {last} (in {sys.executable}); install it there, leave it out "
                "(--preload none imports nothing), or use --start-method spawn"
            )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return (
            f"--preload {','.join(modules)}: a module initialised CUDA while it was imported; a "
            "forked worker cannot use CUDA then. Leave it out, or use --start-method spawn"
        )
    return None


class Later:
    """The modules to import later, and when; ``due`` is infinite while there is nothing to do."""

    def __init__(self) -> None:
        self._modules: list[str] = []
        self._path: str | None = None
        self.due = math.inf

    def plan(self, modules: list[str], path: str | None) -> None:
        """Take down what to import; nothing is due before a worker was started."""
        self._modules, self._path = modules, path

    def begin(self) -> None:
        """Set the time, when a worker is started; the first one counts."""
        if self._modules and self.due == math.inf:
            self.due = time.monotonic() + DELAY

    def carry_out(self) -> str | None:
        """Import the modules; return the problem, if any. Nothing is due any more."""
        modules, self._modules, self.due = self._modules, [], math.inf
        return preload(modules, self._path)
