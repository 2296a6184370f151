"""Starts the server before the agent's own parts are imported: the one takes as long as the other.

The server is started as :class:`elaunch.agent.workers.server.WorkerServer` starts one, which finds
it as one that it was given (``env.SERVER``). What is known later, such as the directory for
temporary files, reaches it with its first message.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from elaunch import env
from elaunch.agent.children import spawn, start_server, title_room
from elaunch.config import Settings
from elaunch.config.flags.table import SECRET_VARIABLES
from elaunch.errors import ElaunchError
from elaunch.server import devices

if TYPE_CHECKING:
    from elaunch.agent.detach import Detached


def run(settings: Settings, detached: Detached | None = None) -> int:
    """Run the job that ``settings`` describe on this node; return the command's exit code.

    ``detached``: the command that waits for a detached agent to be ready. Must be called in the
    main thread, which it keeps until the job has ended. Raises ElaunchError for what is found
    wrong before a worker was started.
    """
    if settings.workdir is not None:
        os.chdir(settings.workdir)
    environ, handled = _environment(settings), _handled_signals(settings)
    if detached is None and env.SERVER not in os.environ:  # a detached agent's output moves first
        _start_server(settings, environ, handled)
    try:
        from elaunch.agent.main import run as run_agent

        return run_agent(settings, environ, handled, detached=detached)
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        limits = "see the limits on processes (ulimit -u, pids.max)"
        text = f"no thread can be started on this node: {limits}"
        raise ElaunchError(text, code="E-PROCESS-LIMIT") from error
    finally:
        _end_unused()


def _environment(settings: Settings) -> dict[str, str]:
    """Return the variables that the workers of all rounds have, without those of a round."""
    environ = {**env.launcher_environment(), **settings.env}
    for name in SECRET_VARIABLES:
        environ.pop(name, None)
    if settings.workdir is not None:
        environ["PWD"] = str(settings.workdir)
    return environ


def _handled_signals(settings: Settings) -> tuple[signal.Signals, ...]:
    """Return what the agent handles; a preemption that its parent has ignored stays ignored."""
    preempting = (
        signum
        for signum in settings.preempt_signals
        if signal.getsignal(signum) is not signal.SIG_IGN
    )
    return (*settings.signals_to_handle, *settings.forward_signals, *preempting)


def _start_server(
    settings: Settings, environ: Mapping[str, str], handled: Iterable[signal.Signals]
) -> None:
    # The agent will handle them, and what is handled has its default action in a child.
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    defaults = [s for s in handled if not (s is signal.SIGHUP and ignored)]
    threads = env.default_omp_threads(environ, devices.known(settings.nproc_per_node) or 2)
    start = partial(spawn, environ={**environ, **threads}, defaults=defaults)
    try:
        pid, ours = start_server(settings.interpreter, title_room(settings), start)
    except OSError:  # the agent reports it when it starts one itself
        return
    os.environ[env.SERVER] = f"{pid}:{ours.detach()}"


def _end_unused() -> None:
    """End the server of an agent that has found something wrong before it took it."""
    given = env.take_server()
    if given is not None:
        pid, lifeline = given
        os.close(lifeline)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
