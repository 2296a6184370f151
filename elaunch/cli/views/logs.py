"""``elaunch logs``: the output of a run, of all ranks or of some (docs/logs.md)."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from elaunch.cli import place as places
from elaunch.endings import INTERRUPTED
from elaunch.errors import UsageError

if TYPE_CHECKING:
    from elaunch.views.logs import Choice, Reader


@click.command("logs", context_settings={"token_normalize_func": places.normal})
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
@places.options
def logs(
    run: str | None,
    rank: str | None,
    node: str | None,
    number: int | None,
    stream: str | None,
    since: str | None,
    **flags: Any,
) -> int:
    """Show what the workers of RUN have written, in the order in which it came.

    Each line is shown with its rank. With one --rank the output is exactly that rank's bytes, its
    stdout on stdout and its stderr on stderr. Without options, a detached run shows what would have
    been on its terminal. RUN is a run id of this machine, the beginning of one, or a run directory;
    without it, the newest run. With --rdzv-backend and --rdzv-endpoint: a running job in a store,
    from any machine that reaches it and the nodes.
    """
    from elaunch.runs import directory
    from elaunch.runs.logtree import STREAMS
    from elaunch.views.logs import Choice, Reader, nodes_of, parse_ranks
    from elaunch.views.logs import follow_console as console

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
    line = places.given(flags, run)
    if dirs:
        _print_directories(run, choice, line)
        return 0
    found = None if line else directory.named(run, os.environ)
    try:
        if found is None:
            _show_job(line, choice, follow)
        elif not (choice.everything and console(found, follow, sys.stdout.buffer)):
            _show(Reader(found, nodes_of(found, node, os.environ), choice, _warn), follow)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the interpreter's flush is quiet
    return 0


def _print_directories(run: str | None, choice: Choice, line: Mapping[str, str]) -> None:
    from elaunch.runs import directory
    from elaunch.views.logs import directories, nodes_of

    if line:
        flag = next(iter(line))
        raise UsageError(f"--dirs prints directories of this machine: leave out --{flag}")
    found = directory.named(run, os.environ)
    nodes = nodes_of(found, choice.node, os.environ)
    for of_rank, of_round, path in directories(found, nodes, choice):
        click.echo(f"rank {of_rank}  round {of_round}  {path}")


def _show_job(line: Mapping[str, str], choice: Choice, follow: bool) -> None:
    from elaunch.views.logs import Reader, nodes_of_job

    with ExitStack() as stack:
        job = places.agents(line, stack)
        _show(Reader(job, nodes_of_job(job, choice.node), choice, _warn), follow)


def _show(reader: Reader, follow: bool) -> None:
    reader.run(follow, sys.stdout.buffer, sys.stderr.buffer)


def _warn(text: str) -> None:
    click.echo(text, err=True)


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
