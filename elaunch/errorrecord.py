"""``elaunch.record``: what torch's ``@record`` does, without the import of torch.

The errors of a job are reported by the launcher, which is another process than the one that raised
them. So a worker leaves its exception in the file that the launcher has named in
``TORCHELASTIC_ERROR_FILE``, as JSON::

    {"message": {"message": "ValueError: boom",
                 "extraInfo": {"py_callstack": "Traceback …", "timestamp": "1700000000"}}}

elaunch.agent.failure.errorfile reads it, as torchrun does; the first failed worker's is what the
failure report begins with. What ``--run-path`` runs is recorded without the script asking for it;
other scripts ask by ``elaunch.record``.
"""

from __future__ import annotations

import faulthandler
import io
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from elaunch import env


def contents(message: str, stack: str) -> dict[str, Any]:
    """Return what the file has of an error."""
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    return {"message": {"message": message, "extraInfo": extra}}


def of_error(error: BaseException) -> dict[str, Any]:
    """Return what the file has of ``error``."""
    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return contents(f"{type(error).__name__}: {error}", stack)


def write(error: Exception) -> None:
    """Write ``error``, which is being handled, to the launcher's file; without one do nothing.

    A file that cannot be written is a line in the log: it must not hide the error itself.
    """
    path = os.environ.get(env.ERROR_FILE)
    if not path:
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(of_error(error), file)
    except OSError as problem:
        # A logger made at the import would be found in every forked worker.
        log = logging.getLogger("elaunch")
        log.warning("%s=%s cannot be written: %s", env.ERROR_FILE, path, problem.strerror)


_P = ParamSpec("_P")
_R = TypeVar("_R")

_TORCH_ERRORS = "torch.distributed.elastic.multiprocessing.errors"


def record(function: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """Decorate a script's main function, so that the launcher can report the exception it raised.

    Works under elaunch, torchrun and whatever else sets ``TORCHELASTIC_ERROR_FILE``; without that
    variable it changes nothing. torch is not imported::

        @elaunch.record
        def main():
            train()

    Exceptions go on as they were raised. As with torch's, ``sys.exit(0)`` makes the function return
    None, other exits go on and are not recorded, and a fatal signal in C code prints the stacks of
    all threads. Where the function is itself a launcher (torch's ``elastic_launch``) and a worker
    of its own has failed, it is that worker's record which is passed on. Use it once per process,
    on a plain function: an ``async`` one would have returned before it raises.
    """

    @wraps(function)
    def recorded(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        _show_fatal_signals()
        try:
            return function(*args, **kwargs)
        except SystemExit as ending:
            if ending.code == 0:
                return None
            raise
        except Exception as error:
            if not _pass_on(error):
                write(error)
            raise

    return recorded


def _show_fatal_signals() -> None:
    try:
        faulthandler.enable(all_threads=True)
    except (AttributeError, RuntimeError, ValueError, io.UnsupportedOperation):
        # stderr was closed or replaced by what is no file: there is nowhere to show them.
        return


def _pass_on(error: Exception) -> bool:
    """Copy the record of the failed worker that ``error`` is about, where it is about one."""
    torch_errors = sys.modules.get(_TORCH_ERRORS)
    if torch_errors is None or not isinstance(error, torch_errors.ChildFailedError):
        return False
    _, failure = error.get_first_failure()
    if failure.error_file != "<N/A>":
        torch_errors.get_error_handler().dump_error_file(failure.error_file, failure.exitcode)
    return True
