"""Run a script here as the interpreter itself would: ``__main__``, path, exit, traceback.

The interpreter's own rules, from CPython's ``Modules/main.c``: ``python FILE`` puts the directory
of the file's real path first on ``sys.path``, ``python -m MODULE`` the working directory; a
directory or a zip archive with ``__main__.py`` goes there itself. Nothing else is imitated: the
interpreter itself shows the exceptions that leave ``__main__`` and ends the process.
"""

from __future__ import annotations

import builtins
import os
import runpy
import signal
import sys
import types
from collections.abc import Callable
from functools import partial
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from importlib.util import MAGIC_NUMBER

from elaunch import errorrecord
from elaunch.server.worker import Job

_as_main: Callable[..., object] = vars(runpy)["_run_module_as_main"]
"""The function that the interpreter itself calls for ``-m``; runpy's public ones run a copy of
``__main__`` that pickle and multiprocessing do not find."""

_replaced: list[types.ModuleType] = []
"""The server's own ``__main__``: the interpreter uses its names to the end, without owning it."""

_SERVER = os.path.dirname(os.path.abspath(__file__)) + os.sep


def prepare(job: Job) -> Callable[[], object]:
    """Set ``sys.argv``, ``sys.path`` and a fresh ``__main__`` for ``job``; return what runs it.

    What is returned is no function of Python's, so that calling it adds no frame to the stack.
    Raises what the interpreter would for a script that cannot be read or compiled.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.orig_argv[:] = job.command()
    sys.argv[:] = [job.entrypoint, *job.args]
    _replaced.append(sys.modules["__main__"])
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins)
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    _alias_for_multiprocessing(main if job.mode != "run-path" else _forwarding())
    if job.mode == "run-path":
        return partial(_recorded, partial(runpy.run_path, job.entrypoint, run_name="__main__"))
    if job.mode == "module":
        _put_first_on_path(os.getcwd())
        sys.argv[0] = "-m"  # while the module is looked for; runpy sets the file's path
        return partial(_as_main, job.entrypoint)
    path = os.getcwd()
    if job.entrypoint != "." or sys.version_info < (3, 11):
        # Not normalised otherwise: the interpreter does not.
        path = os.path.join(path, job.entrypoint)
    if os.path.isdir(path) or _is_archive(path):
        sys.path.insert(0, path)
        return partial(_as_main, "__main__", alter_argv=False)
    _put_first_on_path(os.path.dirname(os.path.realpath(job.entrypoint)))
    return partial(exec, _code(main, path), main.__dict__)


def _is_archive(path: str) -> bool:
    """Whether the interpreter would look for ``__main__.py`` in this file."""
    import zipfile  # torch has imported it; a server that forks nothing does without

    return zipfile.is_zipfile(path)


def _alias_for_multiprocessing(main: types.ModuleType) -> None:
    """Let the objects come back that a child pickles under its name for the script's module.

    A child that multiprocessing spawns imports the script as ``__mp_main__``. multiprocessing has
    set the name to the server's ``__main__`` if the server has imported it; else the script's own
    import of it sets the name.
    """
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = main


def _forwarding() -> types.ModuleType:
    """Return a module with the names of ``__main__`` as it is then: runpy replaces it later."""
    alias = types.ModuleType("__mp_main__")
    alias.__dict__["__getattr__"] = lambda name: getattr(sys.modules["__main__"], name)
    return alias


def _recorded(start: Callable[[], object]) -> None:
    """Call ``start`` as torchrun's ``--run-path`` does: the script need not ask for its record."""
    try:
        start()
    except Exception as error:
        forget_server(error)
        errorrecord.write(error)
        raise


def _put_first_on_path(directory: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, directory)


def _code(main: types.ModuleType, path: str) -> types.CodeType:
    with open(path, "rb") as file:
        source = file.read()
    compiled = path.endswith(".pyc") or source.startswith(MAGIC_NUMBER[:2])  # as pythonrun.c has it
    loader = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", path)
    main.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
    if not compiled:
        return compile(source, path, "exec", dont_inherit=True)
    code = loader.get_code("__main__")
    assert code is not None  # a loader with a file either returns code or raises
    return code


def forget_server(error: BaseException) -> None:
    """Take the frames of the server off the bottom of a traceback before it is raised again.

    Must be called in an ``except`` clause at the very bottom of the stack, before a bare ``raise``.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_SERVER):
        frames = frames.tb_next
    error.__traceback__ = frames
    if sys.version_info < (3, 11):  # its bare raise brings back the traceback that was caught
        _show_by_hook(frames)


def _show_by_hook(frames: types.TracebackType | None) -> None:
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, _: object) -> object:
        sys.excepthook, sys.last_traceback = hook, frames
        return hook(kind, value.with_traceback(frames), frames)

    sys.excepthook = show
