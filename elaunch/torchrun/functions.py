"""``elaunch.run``: a function in each worker of a job, for those who start from Python."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, Literal

from elaunch.config.flags.table import FLAGS
from elaunch.config.values import did_you_mean, signals
from elaunch.env import HANDLED_SIGNALS
from elaunch.torchrun.agentprocess import check
from elaunch.torchrun.calls import run_function

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
