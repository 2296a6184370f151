"""The messages between a worker and its agent: one connection, for all that they send each other.

The worker connects to ``ELAUNCH_AGENT_SOCKET`` and stays (elaunch.wire.local).

from the worker:

==========================================================  =====================================
``{"op": "worker", "wire": 2, "round": r,                   first message, with the descriptor of
"local_rank": k}``                                          its progress page
                                                            (elaunch.wire.progress); with
                                                            ``"name"`` the run gets that name
``{"op": "listens"}``                                       the script asks should_preempt()
``{"op": "heard", "reason": …, "kind": …}``                 it knows of another node's notice, with
                                                            ``"grace"`` where one is stated
``{"op": "ack", "reason": …, "kind": …}``                   the script knows that it is to end, and
                                                            will: exit code 0 now means "preempted"
``{"op": "detach"}``                                        the context is closed
``{"op": …, "n": n, …}``                                    a request about checkpoints
                                                            (elaunch.wire.saver), answered in order
==========================================================  =====================================

from the agent:

==========================================================  =====================================
``{"op": "attached"}``                                      answer to ``worker``
``{"op": "preempt", "reason": …, "kind": …}``               a notice: save, and end with 0; with
                                                            ``"grace"`` within so many seconds,
                                                            with ``"stated"`` those that the
                                                            platform leaves, not the agent's own
``{"n": n, "ok": …, …}``                                    the answer to request ``n``
``{"error": …}``                                            it refuses, and closes
==========================================================  =====================================

``kind`` is ``stop`` (the job is to end, resumable) or ``resize`` (a node joins or leaves; the job
goes on without delay). ``wire`` is the version of these messages and of those about checkpoints: an
agent refuses a worker of another one.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

Kind = Literal["stop", "resize"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
WIRE: Final = 2
MOST_SECONDS: Final = 1e9


class Notice(NamedTuple):
    """Why the workers are asked to save and to end, and whether the job goes on at once.

    ``grace`` is the seconds that they have, from when this was sent, where the platform's deadline
    is known; None: those of ``--shutdown-timeout``.
    """

    reason: str
    kind: Kind = "stop"
    grace: float | None = None


def notice_to_json(notice: Notice) -> dict[str, str | float]:
    """Return the fields of a notice, as messages and the round's store have them."""
    fields: dict[str, str | float] = {"reason": notice.reason, "kind": notice.kind}
    return fields if notice.grace is None else {**fields, "grace": notice.grace}


def seconds_of(value: object) -> float | None:
    """Return a number of seconds that a message holds; None for anything else."""
    known = type(value) in (int, float) and 0.0 <= value <= MOST_SECONDS  # type: ignore[operator]
    return float(value) if known else None  # type: ignore[arg-type]
