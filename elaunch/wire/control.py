"""Asking an agent: the client's half of the agent's Unix socket.

A client sends one message (elaunch.wire.local) and gets one; then the agent closes the connection.

=====================  =====================================================================
request                answer
=====================  =====================================================================
``{"op": "status"}``   the run's record (``elaunch.runs.record``)
``{"op": "preempt",``  ``{"done": "what is done about it"}``; the job is asked to save and to end
``"reason": …,``       within ``left`` seconds, which may be left out, the platform ends it
``"left": …}``
``{"op": "restart",``  ``{"done": "what is done about it"}``, or ``refused`` and why; the round is
``"reason": …}``       asked to end, and the next one to begin
``{"op": "view",``     ``{"nodes": …}``: stacks, workers or log files of nodes
``"of": …, …}``        (``elaunch.agent.status.views``); with ``of`` ``debug`` it stays open
``{"op": "worker",``   a worker stays connected (``elaunch.wire.worker``)
``…}``
anything else          ``{"error": "what is wrong with it"}``
=====================  =====================================================================
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from elaunch.wire.local import BadMessage, LocalChannel, connect

SPY_OPTIONS: Final = ("--native", "--locals")
"""The options that a command may pass to py-spy."""
STACKS_S: Final = 35.0
"""Seconds for all nodes to show their stacks."""
LOGS_S: Final = 5.0
"""Seconds for a node to show a piece of its log files."""
PROFILE_S: Final = 45.0
"""Seconds for a flame graph beyond those that py-spy looks."""
WORKERS_S: Final = 2.0
"""Seconds for all nodes to show what their workers do."""
LONGEST_S: Final = 3600
"""Seconds that py-spy may look."""
ATTEMPTS: Final = 3
"""How often a request is sent that the agent has not taken."""
MOST_BYTES: Final = 1 << 18
"""Bytes of a log file in one answer."""


def debug_socket(directory: Path, pid: int) -> Path:
    """Return where a command that debugs the worker ``pid`` listens, in the run's directory."""
    return directory / f"debug-{pid}"


def ask(
    path: Path,
    request: Mapping[str, object],
    timeout: float = 2.0,
    stack: contextlib.ExitStack | None = None,
) -> dict[str, Any]:
    """Send ``request`` to the agent that listens at ``path`` and return its answer.

    With ``stack`` the connection stays open until that is closed. ``timeout`` bounds the whole
    exchange, in seconds. Raises FileNotFoundError or ConnectionRefusedError when no agent listens
    there, TimeoutError when it does not answer, and ConnectionError when it refuses the request or
    closes the connection.
    """
    until = time.monotonic() + timeout
    try:
        with contextlib.ExitStack() as own:
            channel = _sent(path, request, until)
            (own if stack is None else stack).callback(channel.close)
            received = channel.receive(until)
    except TimeoutError:
        raise TimeoutError(f"the agent at {path} does not answer") from None
    except BadMessage as error:
        raise ConnectionError(f"the agent at {path} cannot be understood: {error}") from None
    if received is None:
        raise ConnectionError(f"the agent at {path} hung up without an answer")
    answer, _ = received
    if "error" in answer:
        raise ConnectionError(f"the agent at {path} refused: {answer!r}")
    return answer


def _sent(path: Path, request: Mapping[str, object], until: float) -> LocalChannel:
    """Return a connection that the request has been sent on.

    The agent hangs up on a client that does not send its request in time, and a busy machine may
    hold this one up: what the agent has not taken is sent again.
    """
    for attempt in range(ATTEMPTS):
        left = max(0.0, until - time.monotonic())
        channel = LocalChannel(connect(path, left))
        try:
            channel.send(request, seconds=left)
        except OSError as error:
            channel.close()
            if not isinstance(error, BrokenPipeError) or attempt == ATTEMPTS - 1:
                raise
        else:
            return channel
    raise AssertionError("unreachable")
