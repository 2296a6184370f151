"""``elaunch preempt``: ask a running job to save and to end (docs/preemption.md)."""

from __future__ import annotations

import os
from typing import Final

import click

from elaunch.errors import UsageError

ANSWER_S: Final = 15.0
"""Seconds for the agent to answer; it serves one client after the other, each in a few seconds."""


@click.command("preempt")
@click.argument("run", metavar="RUN")
@click.option(
    "--reason",
    default="elaunch preempt",
    show_default=True,
    metavar="TEXT",
    help="What the script, the log and the record call it.",
)
def preempt(run: str, reason: str) -> None:
    """Ask the workers of RUN to save and to end.

    Their script learns of it by ctx.preempt.should_preempt(), on all ranks and nodes at the same
    call. When all have ended with 0, the run is PREEMPTED and its command ends with 75; who has not
    after --shutdown-timeout seconds is killed. RUN is a run id of this machine, or the beginning of
    one; one node of several is enough.
    """
    from elaunch.run import directory
    from elaunch.wire import control

    found = directory.find(run, os.environ)
    if not reason.strip() or not reason.isprintable():
        raise UsageError(f"--reason {reason!r}: give a text of one line")
    name = directory.run_id_of(found)
    try:
        answer = control.ask(found.socket, {"op": "preempt", "reason": reason}, timeout=ANSWER_S)
    except (FileNotFoundError, ConnectionRefusedError):
        raise UsageError(
            f"RUN {name} does not run: `elaunch status {name}` tells how it ended"
        ) from None
    except TimeoutError:
        raise UsageError(
            f"RUN {name} has not answered for {ANSWER_S:g} s, so the request is withdrawn: its "
            f"agent is stopped or overloaded; look at `elaunch status {name}`, then ask again"
        ) from None
    except ConnectionError as error:
        raise UsageError(f"RUN {name} could not be asked: {error}") from None
    click.echo(f"{name}: {answer['done']}")
