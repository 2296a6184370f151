"""``elaunch logs``: the output of a run, of all ranks or of some (docs/logs.md)."""

from __future__ import annotations

import os
import re
import sys
import time

import click

from elaunch.endings import INTERRUPTED
from elaunch.errors import UsageError


@click.command("logs")
@click.argument("run", required=False, metavar="[RUN]")
@click.option(
    "--rank", metavar="RANKS", help="Only these ranks, as in 3,7-9; of one rank, its exact bytes."
)
@click.option("--node", metavar="NODE", help="Only this node, by its rank or host.")
@click.option("--round", "number", type=click.IntRange(min=0), metavar="N", help="Only this round.")
@click.option(
    "--stream",
    type=click.Choice(["stdout", "stderr"]),
    help="Only this stream.  [default: both]",
)
@click.option(
    "--since", metavar="WHEN", help="Only lines since 90s, 10m or 3h ago, or since a date and time."
)
@click.option("--grep", metavar="REGEX", help="Only lines in which this is found.")
@click.option(
    "-f", "--follow", is_flag=True, help="Follow until the run ends; Ctrl-C ends only this command."
)
@click.option("--dirs", is_flag=True, help="Print the directories of the log files, by rank.")
def logs(
    run: str | None,
    rank: str | None,
    node: str | None,
    number: int | None,
    stream: str | None,
    since: str | None,
    **flags: str | bool | None,
) -> int:
    """Show what the workers of RUN have written, in the order in which it came.

    Each line is shown with its rank. With one --rank the output is exactly that rank's bytes, its
    stdout on stdout and its stderr on stderr. Without options, a detached run shows what would have
    been on its terminal. RUN is a run id of this machine, the beginning of one, or a run directory;
    without it, the newest run.
    """
    from elaunch.monitor.logfiles import Choice, Reader, directories, nodes_of, parse_ranks
    from elaunch.monitor.logfiles import follow_console as console
    from elaunch.runs import directory
    from elaunch.runs.logtree import STREAMS

    follow, dirs, grep = bool(flags["follow"]), bool(flags["dirs"]), flags["grep"]
    choice = Choice(
        None if rank is None else parse_ranks("--rank", rank),
        number,
        (stream,) if stream else STREAMS,
        node,
        None if since is None else _moment(since),
        _pattern(grep) if isinstance(grep, str) else None,
    )
    if dirs and (follow or stream or since or grep):
        raise UsageError(
            "--dirs prints directories: leave out --follow, --stream, --since and --grep"
        )
    found = directory.named(run, os.environ)
    if dirs:
        nodes = nodes_of(found, node, os.environ)
        for of_rank, of_round, path in directories(found, nodes, choice):
            click.echo(f"rank {of_rank}  round {of_round}  {path}")
        return 0
    try:
        if not (choice.everything and console(found, follow, sys.stdout.buffer)):
            nodes = nodes_of(found, node, os.environ)
            reader = Reader(found, nodes, choice, lambda text: click.echo(text, err=True))
            reader.run(follow, sys.stdout.buffer, sys.stderr.buffer)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the interpreter's flush is quiet
    return 0


def _moment(raw: str) -> float:
    """Return the time that ``--since`` names, in seconds since the epoch."""
    from elaunch.config.values import moment

    for word in (f"+{raw.strip()}", raw):
        try:
            found = moment(word)
        except (ValueError, OverflowError):
            continue
        if found.after is not None:
            return time.time() - found.after
        if found.at is not None:
            return found.at
    raise UsageError(
        f"--since {raw}: is no time; give how long ago, as 90s, 10m, 3h, or a date and time, as "
        "2026-05-31T12:00"
    )


def _pattern(raw: str) -> re.Pattern[bytes]:
    try:
        return re.compile(os.fsencode(raw))
    except re.error as error:
        raise UsageError(f"--grep {raw}: is no regular expression: {error}") from None
