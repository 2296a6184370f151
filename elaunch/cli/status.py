"""``elaunch status``: how this user's runs stand, or one of them in detail (docs/status.md)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from elaunch.errors import UsageError

if TYPE_CHECKING:
    from elaunch.monitor.watch import Read, Reading

INTERRUPTED = 130


@click.command("status")
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/status.md).")
@click.option("--watch", "watching", is_flag=True, help="Follow it until it ends.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help="Time between two readings with --watch.  [default: 1.0]",
)
@click.option("--all", "everything", is_flag=True, help="List every kept run, other hosts' too.")
def status(
    run: str | None, as_json: bool, watching: bool, interval: float | None, everything: bool
) -> None:
    """Show the runs of this user on this machine, or one RUN in detail.

    RUN is a run id, the beginning of one, or a run directory. It is right while the run goes on,
    after it ended, and after its agent was killed.
    """
    _refuse_idle_flags(run, watching, interval, everything)
    with _quiet_interrupt():
        read = _reader(run, everything)
        if not watching:
            _print(read(None), as_json)
        elif as_json or not _on_terminal():
            _follow_in_lines(read, interval or 1.0, as_json)
        else:
            _follow_on_terminal(read, interval or 1.0)


def _refuse_idle_flags(
    run: str | None, watching: bool, interval: float | None, everything: bool
) -> None:
    if interval is not None and not watching:
        raise UsageError(f"--interval {interval:g} has an effect only with --watch")
    if everything and run is not None:
        raise UsageError(f"--all lists every run: leave out RUN {run!r}, or leave out --all")


def _reader(run: str | None, everything: bool) -> Read:
    from elaunch.monitor.watch import list_reader, run_reader
    from elaunch.rundir import find

    if run is None:
        return list_reader(os.environ, everything)
    return run_reader(find(run, os.environ))


def _on_terminal() -> bool:
    """Tell whether stdout is a terminal on which rich can draw."""
    encoding = (sys.stdout.encoding or "").lower()
    return (
        sys.stdout.isatty()
        and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        and encoding.startswith("utf")
    )


def _print(reading: Reading, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(reading.document, indent=2))
    elif _on_terminal():
        from rich.console import Console

        from elaunch.monitor.render import styled

        console = Console()
        console.print(styled(reading.page, console.width))
    else:
        _echo_plain(reading)


def _echo_plain(reading: Reading) -> None:
    from elaunch.monitor.render import plain

    encoding = sys.stdout.encoding or "utf-8"
    text = plain(reading.page).encode(encoding, "backslashreplace").decode(encoding)
    click.echo(text, nl=False)


def _follow_in_lines(read: Read, interval: float, as_json: bool) -> None:
    from elaunch.monitor.watch import changes, watch

    for number, reading in enumerate(changes(watch(read, interval))):
        if as_json:
            click.echo(json.dumps(reading.document))
            continue
        if number:
            click.echo()
        _echo_plain(reading)


def _follow_on_terminal(read: Read, interval: float) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    from elaunch.monitor.render import styled
    from elaunch.monitor.watch import watch

    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        for reading in watch(read, interval):
            # The cursor rests on a line of its own, where the terminal's ^C moves nothing.
            live.update(Group(styled(reading.page, console.width), ""), refresh=True)
        live.vertical_overflow = "visible"


@contextmanager
def _quiet_interrupt() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
