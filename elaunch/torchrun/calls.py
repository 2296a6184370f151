"""A job whose workers call a function: how the function gets to them, and its results come back.

By ``spawn`` and ``forkserver`` function and arguments are pickled as multiprocessing does it for a
process that it spawns: by name, after the module ``__main__`` was imported there as
``__mp_main__``. Pipes of one direction, queues and tensors in shared memory among the arguments are
opened again by way of this process, so they are shared with it. By ``fork`` the workers are forks
of this process and have the function: closures, sockets and what a notebook defines work.

``run`` is ``elaunch.run``, for those who start from Python.
"""

from __future__ import annotations

import fcntl
import io
import multiprocessing
import os
import pickle
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing import context, reduction, spawn
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, cast

from elaunch.config.command import CALLER
from elaunch.config.flags.table import FLAGS
from elaunch.config.values import did_you_mean, signals
from elaunch.env import HANDLED_SIGNALS, SCRATCH
from elaunch.errorrecord import record
from elaunch.errors import UsageError
from elaunch.proc import own_prefix
from elaunch.server import loop
from elaunch.torchrun import worker
from elaunch.torchrun.agentprocess import Ended, check, run_agent

Function = Callable[..., object]
FORK: Final = "fork"
START_METHODS: Final = ("spawn", "forkserver", FORK)
_WORDS = ("--module=yes", "--", CALLER)
_OF_MAIN = b"\x8c\x08__main__"
"""A pickle's reference to that module: the text, of 8 characters."""


def run_function(
    function: Function,
    args: Sequence[object],
    flags: Sequence[str],
    *,
    start_method: str | None,
    handled: Iterable[signal.Signals] = (),
) -> tuple[Ended, dict[int, Any]]:
    """Call ``function(*args)`` in each worker of a job; return its end, and the results by rank.

    The results are those of this node's workers in the last round; there are none unless the job
    has ended well. Raises what pickling the function, or unpickling a result, raises.

    Args:
        function: what each worker calls.
        args: positional arguments.
        flags: of ``elaunch run``.
        start_method: one of START_METHODS, UsageError for another; None for ``forkserver``, or
            ``fork`` where no other process can have the call.
        handled: signals to forward to the job.
    """
    call = call_of(function, args, start_method)
    with tempfile.TemporaryDirectory(prefix=own_prefix(SCRATCH)) as directory:
        place = Path(directory)
        method = [f"--start-method={'spawn' if start_method == 'spawn' else 'forkserver'}"]
        serve = None
        if call is None:
            method.append("--preload=none")
            serve = partial(_serve, function, args)
        else:
            (place / worker.CALL).write_bytes(call)
        words = [*flags, *method, *_WORDS, directory, "${local_rank}"]
        ended = run_agent(words, place, handled, serve=serve)
        return ended, _results(place) if ended.exit_code == 0 else {}


def call_of(function: Function, args: Sequence[object], start_method: str | None) -> bytes | None:
    """Return the pickled call; None where the workers are to be forks of this process.

    Raises UsageError for a start method that is not known, or cannot be had; what pickling raises.
    """
    if start_method not in (None, *START_METHODS):
        hint = did_you_mean(start_method, START_METHODS)
        allowed = ", ".join(START_METHODS)
        raise UsageError(f"start_method: {start_method!r} is not known{hint} (allowed: {allowed})")
    if start_method == FORK:
        return None
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as in worker
        raise UsageError(
            "a worker imports the program's main module, which calls elaunch.run() or "
            'elastic_launch() again; put that call below `if __name__ == "__main__":`'
        )
    if not _of_no_file(function):
        try:
            call = pickled(function, args)
        except Exception:  # an object's own pickling raises what it likes: a RuntimeError in torch
            if start_method is None:
                return None
            raise
        if not _of_no_file(function, call):
            return call
    if start_method is None:
        return None
    name = getattr(function, "__name__", type(function).__name__)
    raise UsageError(
        f"start_method: {start_method!r} cannot be had for {name}(): no file has what a "
        "notebook or an interpreter defines, so that only a fork of this process has it; give "
        "start_method='fork', or import the function from a module"
    )


def _of_no_file(function: Function, call: bytes = b"") -> bool:
    """Whether a main module that no other process can import, as a notebook's, has a function.

    Or the one in a partial, or the class of an argument, in a ``call`` that :func:`pickled` made.
    """
    main = sys.modules["__main__"]
    here = getattr(function, "__module__", None) == "__main__" or _OF_MAIN in call
    return here and not os.path.exists(getattr(main, "__file__", None) or "")


def pickled(function: Function, args: Sequence[object]) -> bytes:
    """Return what a worker loads: how to prepare its process, and the call."""
    file = io.BytesIO()
    context.set_spawning_popen(cast("Any", _Spawning()))
    try:
        reduction.dump(spawn.get_preparation_data("SpawnProcess-1"), file)
        reduction.dump((function, tuple(args)), file)
    finally:
        context.set_spawning_popen(None)
    return file.getvalue()


class _OpenedAgain:
    """A file that another process opens by way of the one that has it."""

    def __init__(self, fd: int) -> None:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):  # nobody can open one again
            raise pickle.PicklingError(
                "a socket, or Pipe() of both directions, gets to workers by the start method fork "
                "alone; Pipe(duplex=False) and queues get there by all"
            )
        self._path = f"/proc/{os.getpid()}/fd/{fd}"
        self._mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE

    def detach(self) -> int:
        """Return a descriptor of the calling process."""
        return os.open(self._path, self._mode | os.O_CLOEXEC)


class _Spawning:
    """Stands where multiprocessing's pickler expects the process that it starts."""

    DupFd = _OpenedAgain

    @staticmethod
    def duplicate_for_child(fd: int) -> int:
        """Return what identifies a file for DupFd."""
        return fd


def _results(place: Path) -> dict[int, Any]:
    found = [tuple(map(int, path.name.split("."))) for path in place.glob("[0-9]*.[0-9]*")]
    last = max((number for number, _ in found), default=0)
    ranks = sorted(rank for number, rank in found if number == last)
    return {rank: pickle.loads((place / f"{last}.{rank}").read_bytes()) for rank in ranks}


def _serve(function: Function, args: Sequence[object], lifeline: int) -> NoReturn:
    """Be the server of an agent; in the workers, which are forks of it, call the function."""
    job = loop.serve(lifeline, of_caller=True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as elaunch.server.script has it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _print_to_own_files()
    if threads := sys.modules.get("concurrent.futures.thread"):
        vars(threads)["_threads_queues"].clear()  # as Python 3.12 does: its end would wait for them
    place, local_rank = job.args
    call = record(partial(worker.deliver, function, args, Path(place), local_rank))
    name = f"ForkProcess-{job.local_rank + 1}"
    process: Any = multiprocessing.get_context(FORK).Process(target=call, name=name)
    code = 1
    try:
        code = process._bootstrap()
    finally:
        os._exit(code)


def _print_to_own_files() -> None:
    """Have what a worker prints in its log: a notebook's streams, or those of a test, lead away."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        try:
            stream = getattr(sys, name)
            there = stream.fileno() == fd and not stream.seekable()  # a file before it was a pipe
        except (AttributeError, OSError, ValueError):  # no stream, or one that is no file
            there = False
        if not there:
            errors = "backslashreplace" if fd == 2 else None
            setattr(sys, name, open(fd, "w", buffering=1, errors=errors, closefd=False))  # noqa: SIM115


_HANDLED = signals(HANDLED_SIGNALS)
_OTHERS = ("file", "module", "no-python", "run-path", "detach", "dry-run", "exit-codes")
_FLAGS = {name for flag in FLAGS for name in (flag.name, *flag.aliases)}.difference(_OTHERS)

StartMethod = Literal["spawn", "forkserver", "fork"]


def run(
    function: Callable[..., Any],
    *args: Any,
    nproc: int | str = 1,
    start_method: StartMethod | None = None,
    **flags: Any,
) -> dict[int, Any]:
    """Call ``function(*args)`` in ``nproc`` workers, and return what it returned, by rank.

    ::

        if __name__ == "__main__":
            losses = elaunch.run(train, 0.1, nproc=4, max_restarts=2, checkpoint_dir="ckpt")

    The workers are those of ``elaunch run``: with its variables, restarts, checkpoints and reports.
    It blocks until the job has ended. One process of each node calls it, and gets the results of
    that node's workers, which are pickled. Any rank of a job may call it, for a job of its own.

    Args:
        function: what each worker calls; a function of a module, or with ``fork`` any.
        args: its arguments.
        nproc: workers on this node: a number, ``cpu``, ``gpu`` or ``auto``.
        start_method: ``forkserver`` and ``spawn`` pickle the function by its name and import the
            program's main module again, as multiprocessing does; ``fork`` forks this process.
            By default ``forkserver``, and ``fork`` for what cannot be pickled, as in a notebook.
        flags: of ``elaunch run``, with ``_`` for ``-``: numbers, texts, True and False, lists.

    Raises:
        ChildFailedError: workers failed and no restart was left (``elaunch.torchrun``, torch's).
        KeyboardInterrupt: Ctrl-C; the workers have ended.
        SignalException: another signal has ended the job.
        ElaunchError: what the command would refuse, or cannot do.
        TypeError: there is no such flag, or ``function`` cannot be called.
    """
    _refuse_what_is_none(function)
    words = [f"--nproc-per-node={nproc}"]
    for name, value in flags.items():
        words += _word(name.replace("_", "-"), value)
    name = getattr(function, "__name__", type(function).__name__)
    words.append(f"--name={name}")
    ended, results = run_function(
        function, args, words, start_method=start_method, handled=_HANDLED
    )
    if signal.SIGINT in ended.received:
        raise KeyboardInterrupt
    check(ended, name)
    return results


def _refuse_what_is_none(function: object) -> None:
    if not callable(function):
        kind = type(function).__name__
        raise TypeError(f"elaunch.run() takes a function, not the {kind} {function!r}")


def _word(name: str, value: Any) -> list[str]:
    if name not in _FLAGS:
        word, known = (each.replace("-", "_") for each in (name, " ".join(_FLAGS)))
        hint = did_you_mean(word, ["nproc", "start_method", *known.split()])
        by_name = f"an argument of the function: functools.partial(function, {word}=...)"
        raise TypeError(f"elaunch.run() has no flag {word!r}{hint or f'; {by_name}'}")
    if value is None:
        return []
    if isinstance(value, bool):
        value = "yes" if value else "no"
    elif isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return [f"--{name}={value}"]
