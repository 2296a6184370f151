"""The messages between a worker and its agent over the agent's Unix socket.

The worker connects to ``ELAUNCH_AGENT_SOCKET`` and stays; lines of JSON go both ways.

from the worker:

==========================================================  =====================================
``{"op": "attach", "round": r, "local_rank": k, "pid": p}``  first line, with the descriptor of its
                                                            progress page (elaunch.wire.progress);
                                                            with ``"name"`` the run gets that name
``{"op": "listens"}``                                       the script asks should_preempt()
``{"op": "heard", "reason": …, "kind": …}``                 it knows of a notice (from another node)
``{"op": "ack", "reason": …, "kind": …}``                   the script knows that it is to end, and
                                                            will: exit code 0 now means "preempted"
``{"op": "detach"}``                                        the context is closed
==========================================================  =====================================

from the agent:

==========================================================  =====================================
``{"op": "attached"}``                                      answer to ``attach``
``{"op": "preempt", "reason": …, "kind": …}``               a notice: save, and end with 0; with
                                                            ``"grace"`` within so many seconds
``{"error": …}``                                            it refuses, and closes
==========================================================  =====================================

``kind`` is ``stop`` (the job is to end, resumable) or ``resize`` (a node joins or leaves; the job
goes on without delay).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

Kind = Literal["stop", "resize"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True)
class Notice:
    """Why the workers are asked to save and to end, and whether the job goes on at once."""

    reason: str
    kind: Kind = "stop"
