"""``elaunch stop``, ``preempt`` and ``restart``: end a running job, or its round, by its name.

docs/status.md and docs/preemption.md.
"""

from __future__ import annotations

import os
from typing import Final

import click

from elaunch.errors import UsageError
from elaunch.wire.worker import MOST_SECONDS

TIMED_OUT: Final = 1


@click.command("stop")
@click.argument("run", metavar="RUN")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.0),
    metavar="SECONDS",
    help="How long to wait for its end; 0: not at all.  [default: without a limit]",
)
def stop(run: str, timeout: float | None) -> int:
    """End the job RUN on this node, as SIGTERM to its agent does, and wait for its end.

    Workers that ask should_preempt() save first. A second `elaunch stop` meanwhile ends the grace
    of --shutdown-timeout. RUN is a run id of this machine, or the beginning of one; of several
    nodes this one leaves the job.
    """
    from elaunch.monitor import nodeviews
    from elaunch.runs import directory
    from elaunch.wire.local import is_readable

    found = directory.find(run, os.environ)
    name = directory.run_id_of(found)
    agent = nodeviews.send_stop(found)
    ended = True
    if agent is not None:
        try:
            ended = timeout == 0 or is_readable(agent, timeout)
        finally:
            os.close(agent)
    if not ended:
        click.echo(f"{name}: SIGTERM was sent, and it has not ended in {timeout:g} s", err=True)
        return TIMED_OUT
    click.echo(f"{name}: {'SIGTERM was sent' if timeout == 0 else found.read_state()['state']}")
    return 0


def _asked(run: str, request: dict[str, object], verb: str) -> None:
    """Send the agent of RUN a request with a reason, and print what is done about it."""
    from elaunch.monitor import nodeviews
    from elaunch.runs import directory

    reason = str(request["reason"])
    if not reason.strip() or not reason.isprintable():
        raise UsageError(f"--reason {reason!r}: give a text of one line")
    found = directory.find(run, os.environ)
    done = nodeviews.asked(found, request, verb)
    click.echo(f"{directory.run_id_of(found)}: {done}")


@click.command("preempt")
@click.argument("run", metavar="RUN")
@click.option(
    "--reason",
    default="elaunch preempt",
    show_default=True,
    metavar="TEXT",
    help="What the script, the log and the record call it.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0.0, max=MOST_SECONDS),
    metavar="SECONDS",
    help="How long the platform leaves the job; it counts where RUN has workers on this node.  "
    "[default: its --shutdown-timeout]",
)
def preempt(run: str, reason: str, deadline: float | None) -> None:
    """Ask the workers of RUN to save and to end.

    Their script learns of it by ctx.preempt.should_preempt(), on all ranks and nodes at the same
    call. When all have ended with 0, the run is PREEMPTED and its command ends with 75; who has not
    by the deadline is killed. RUN is a run id of this machine, or the beginning of one; one node of
    several is enough.
    """
    request: dict[str, object] = {"op": "preempt", "reason": reason}
    if deadline is not None:
        request["left"] = deadline
    _asked(run, request, "end")


@click.command("restart")
@click.argument("run", metavar="RUN")
@click.option(
    "--reason",
    default="elaunch restart",
    show_default=True,
    metavar="TEXT",
    help="What the script, the log and the record call it.",
)
def restart(run: str, reason: str) -> None:
    """End the round of RUN on all its nodes; the next one begins from the newest checkpoint.

    That is no failure, and uses no restart of --max-restarts. Workers that ask should_preempt()
    save first, all others get SIGTERM; who has not ended after --shutdown-timeout is killed. RUN is
    a run id of this machine, or the beginning of one; one node of several is enough.
    """
    _asked(run, {"op": "restart", "reason": reason}, "restart")
