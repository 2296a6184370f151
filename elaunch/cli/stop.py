"""``elaunch stop``, ``preempt`` and ``restart``: end a running job, or its round, by its name.

docs/status.md and docs/preemption.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import click

from elaunch.config import values
from elaunch.errors import UsageError
from elaunch.wire.worker import MOST_SECONDS

TIMED_OUT: Final = 1
DAY_S: Final = 86_400
LONGEST_WAIT_S: Final = 24 * DAY_S
"""The longest that poll() can wait."""

Command = Callable[..., Any]
Callback = Callable[[click.Context, click.Parameter, str | None], float | None]


def up_to(most: float) -> Callback:
    """Return the callback of an option: it gives the seconds, ``most`` of them at the most."""

    def convert(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
        if value is None:
            return None
        try:
            seconds = values.duration(value.strip())
        except ValueError:
            fault = f"{value!r} is no duration such as 90, 30m, 4h or 2d"
            raise click.BadParameter(fault) from None
        if seconds > most:
            raise click.BadParameter(f"{value!r} is longer than {most / DAY_S:.0f} days")
        return seconds

    return convert


@click.command("stop")
@click.argument("run", metavar="RUN")
@click.option(
    "--timeout",
    callback=up_to(LONGEST_WAIT_S),
    metavar="DURATION",
    help="Time to wait for its end, as 90, 30m, 1h; 0: do not wait.  [default: no limit]",
)
def stop(run: str, timeout: float | None) -> int:
    """End the job RUN on this node, and wait for its end.

    The agent gets SIGTERM. Workers that ask should_preempt() save first. A second `elaunch stop`
    meanwhile kills the workers at once. Of a job on several nodes, this node leaves. RUN is a run
    id of this machine, the beginning of one, or a run directory.
    """
    from elaunch.runs import directory
    from elaunch.views import agents
    from elaunch.wire.local import is_readable

    found = directory.find(run, os.environ)
    name = directory.unique_name(found, os.environ)
    agent = agents.send_stop(found)
    ended = True
    if agent is not None:
        if why := agents.suspended(found):
            click.echo(f"{name}: SIGTERM was sent; it is received later, for its {why}", err=True)
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
    from elaunch.runs import directory
    from elaunch.views import agents

    reason = str(request["reason"])
    if not reason.strip() or not reason.isprintable():
        raise UsageError(f"--reason {reason!r}: give a text of one line")
    found = directory.find(run, os.environ)
    done = agents.asked(found, request, verb)
    click.echo(f"{directory.unique_name(found, os.environ)}: {done}")


def _reason(default: str) -> Callable[[Command], Command]:
    text = "Reason that the script, the log and the record show."
    return click.option("--reason", default=default, show_default=True, metavar="TEXT", help=text)


@click.command("preempt")
@click.argument("run", metavar="RUN")
@_reason("elaunch preempt")
@click.option(
    "--deadline",
    callback=up_to(MOST_SECONDS),
    metavar="DURATION",
    help="Time that the platform leaves the job, as 90, 5m; only where RUN has workers here.  "
    "[default: its --shutdown-timeout]",
)
def preempt(run: str, reason: str, deadline: float | None) -> None:
    """Ask the workers of RUN to save and end.

    The script learns of it by ctx.preempt.should_preempt(), on all ranks and nodes at the same
    call. When all workers have ended with 0, the run is PREEMPTED and its command ends with 75.
    Workers that still run at the deadline are killed. RUN is a run id of this machine, the
    beginning of one, or a run directory; any node of the job will do.
    """
    request: dict[str, object] = {"op": "preempt", "reason": reason}
    if deadline is not None:
        request["left"] = deadline
    _asked(run, request, "end")


@click.command("restart")
@click.argument("run", metavar="RUN")
@_reason("elaunch restart")
def restart(run: str, reason: str) -> None:
    """Restart RUN on all its nodes from the newest checkpoint.

    The round ends, and the next one begins; it counts as no failure and uses up no restart of
    --max-restarts. Workers that ask should_preempt() save first; others get SIGTERM. Workers that
    still run after --shutdown-timeout are killed. RUN is a run id of this machine, the beginning of
    one, or a run directory; any node of the job will do.
    """
    _asked(run, {"op": "restart", "reason": reason}, "restart")
