"""Import what the workers will need, once, before they are forked.

Most of it before the first fork; elaunch.server.later has the rest.
"""

from __future__ import annotations

import gc
import importlib
import sys
import traceback
from collections.abc import Sequence


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
