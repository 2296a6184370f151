"""``elaunch logs``: the output of a run, of all ranks or of one (docs/logs.md)."""

from __future__ import annotations

import os
import sys

import click

from elaunch.endings import INTERRUPTED
from elaunch.errors import UsageError


@click.command("logs")
@click.argument("run", metavar="RUN")
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Only this rank, as written.")
@click.option("--round", "number", type=click.IntRange(min=0), metavar="N", help="Only this round.")
@click.option(
    "--stream",
    type=click.Choice(["stdout", "stderr"]),
    help="Only this one.  [default: both]",
)
@click.option(
    "-f", "--follow", is_flag=True, help="Go on until the run ends; Ctrl-C only stops it."
)
@click.option("--dirs", is_flag=True, help="Print the directories of the log files by rank.")
def logs(
    run: str, rank: int | None, number: int | None, stream: str | None, follow: bool, dirs: bool
) -> int:
    """Show what the workers of RUN on this node have written, round after round.

    With --rank: exactly the bytes of that rank, its stdout to stdout and its stderr to stderr.
    Without: of a detached run what its agent has shown; else the lines of all ranks, each with its
    rank. RUN is a run id of this machine, or the beginning of one, or a run directory.
    """
    from elaunch.monitor.logfiles import Choice, Reader, directories
    from elaunch.runs import directory

    found = directory.find(run, os.environ)
    choice = Choice(rank, number, (stream,) if stream else ("stdout", "stderr"))
    if dirs:
        if follow or stream:
            raise UsageError("--dirs prints directories: leave out --follow and --stream")
        for of_rank, of_round, path in directories(found, choice):
            click.echo(f"rank {of_rank}  round {of_round}  {path}")
        return 0
    reader = Reader(found, choice, sys.stdout.buffer, sys.stderr.buffer)
    try:
        reader.run(follow)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the interpreter's flush is quiet
    return 0
