"""``elaunch status``: how runs stand (docs/status.md).

Without rendezvous flags: this user's runs on this machine, or one of them in detail. With them: a
whole job, as read from the store in which its agents meet.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from elaunch.config.flags.table import TABLE
from elaunch.endings import INTERRUPTED
from elaunch.errors import UsageError
from elaunch.monitor.page import echo_plain, on_terminal, show

if TYPE_CHECKING:
    from elaunch.monitor.watch import Read, WatchReading

# The flags of ``elaunch run`` that set where a job's agents meet, and what they are here.
PLACE_HELP = {
    "rdzv-backend": "Show a job on all its nodes, as the store where they meet has it.",
    "rdzv-endpoint": "Address of that store; several for etcd.",
    "rdzv-id": "Run id of the job (default: the only job of that store, or a list).",
    "rdzv-conf": "Access to the store: user, certificates, prefix.",
    "rdzv-secret-file": "File with the secret of the job's agents, where they have one.",
    "master-addr": "Address of node 0, for the static backend in place of an endpoint.",
    "master-port": "Port of node 0 (default: 29500).",
}
PLACE_FLAGS = tuple(TABLE[name] for name in PLACE_HELP)

Wait = Callable[[float], None]


def _place_options(command: Callable[..., None]) -> Callable[..., None]:
    for flag in reversed(PLACE_FLAGS):
        names = [f"--{name}" for name in (flag.name, *flag.aliases)]
        text = PLACE_HELP[flag.name]
        command = click.option(*names, flag.dest, metavar=flag.kind.metavar, help=text)(command)
    return command


@click.command(
    "status", context_settings={"token_normalize_func": lambda name: name.replace("_", "-")}
)
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/status.md).")
@click.option("--watch", "watching", is_flag=True, help="Follow until the run ends.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help="Seconds between two readings with --watch.  [default: 1.0]",
)
@click.option(
    "--all", "everything", is_flag=True, help="List every kept run, also those of other hosts."
)
@_place_options
def status(
    run: str | None,
    as_json: bool,
    watching: bool,
    interval: float | None,
    everything: bool,
    **place: str | None,
) -> None:
    """List the runs of this user on this machine, or show one RUN in detail.

    RUN is a run id, the beginning of one, or a run directory. The command works while the run goes
    on, after it ended, and after its agent was killed.

    With --rdzv-backend and --rdzv-endpoint, show a job on all its nodes, from any machine that
    reaches the store where they meet.
    """
    _refuse_idle_flags(run, watching, interval, everything)
    line = {flag.name: text for flag in PLACE_FLAGS if (text := place[flag.dest]) is not None}
    _refuse_local_words(run, everything, line)
    with _quiet_interrupt(), ExitStack() as stack:
        read, wait = _job_reader(line, stack) if line else _reader(run, everything)
        if not watching:
            _print(read(None), as_json)
            return
        from elaunch.monitor.watch import watch

        readings = watch(read, interval or 1.0, _with_reader(wait))
        if as_json or not on_terminal():
            _follow_in_lines(readings, as_json)
        else:
            _follow_on_terminal(readings)


@click.command("runs")
@click.argument("verb", default="ls", metavar="[ls]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/status.md).")
@click.option(
    "--all", "everything", is_flag=True, help="List every kept run, also those of other hosts."
)
def runs(verb: str, as_json: bool, everything: bool) -> None:
    """List the runs of this user on this machine, the newest first.

    It is the list of `elaunch status`; `elaunch status RUN` shows one of them.
    """
    if verb != "ls":
        raise UsageError(f"elaunch runs lists all of them; one run: elaunch status {verb}")
    with _quiet_interrupt():
        read, _ = _reader(None, everything)
        _print(read(None), as_json)


def _refuse_idle_flags(
    run: str | None, watching: bool, interval: float | None, everything: bool
) -> None:
    if interval is not None and not watching:
        raise UsageError(f"--interval {interval:g} has an effect only with --watch")
    if everything and run is not None:
        raise UsageError(f"--all lists every run: leave out RUN {run!r}, or leave out --all")


def _refuse_local_words(run: str | None, everything: bool, line: Mapping[str, str]) -> None:
    """Refuse words about the runs of this machine beside flags of a store."""
    if not line:
        return
    flag = next(iter(line))
    if run is not None:
        raise UsageError(
            f"RUN {run!r} is a run of this machine, and --{flag} asks for a job in a store: "
            f"leave one of them out; in a store a job is named by --rdzv-id"
        )
    if everything:
        raise UsageError(
            f"--all lists runs of this machine, and --{flag} asks for a job in a store"
        )


def _reader(run: str | None, everything: bool) -> tuple[Read, Wait]:
    from elaunch.monitor.watch import list_reader, pause, run_reader
    from elaunch.runs.directory import find

    if run is None:
        return list_reader(os.environ, everything), pause
    return run_reader(find(run, os.environ)), pause


def _job_reader(line: Mapping[str, str], stack: ExitStack) -> tuple[Read, Wait]:
    """Return what reads a job, or several, in the store that the flags name."""
    from elaunch.config.rendezvous import resolve_place, resolve_run_id
    from elaunch.monitor.jobreader import JobReader, jobs_reader, no_job, run_ids
    from elaunch.monitor.watch import pause

    try:
        cwd = Path.cwd()
    except FileNotFoundError:
        raise UsageError("the working directory was deleted; go to one that is there") from None
    rendezvous = resolve_place(line, os.environ, cwd)
    run_id = resolve_run_id(line, os.environ)
    if run_id is None:
        ids = run_ids(rendezvous)
        if len(ids) > 1:
            return jobs_reader(rendezvous, ids), pause
        if not ids:
            raise no_job(rendezvous)
        run_id = ids[0]
    reader = stack.enter_context(closing(JobReader(rendezvous, run_id)))
    return reader.read, reader.wait


def _print(reading: WatchReading, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(reading.document, indent=2))
    else:
        show(reading.page)


def _follow_in_lines(readings: Iterator[WatchReading], as_json: bool) -> None:
    from elaunch.monitor.watch import changes

    for number, reading in enumerate(changes(readings)):
        if as_json:
            click.echo(json.dumps(reading.document))
            continue
        if number:
            click.echo()
        echo_plain(reading.page)


def _with_reader(wait: Wait) -> Wait:
    """Return what waits so while somebody reads the output; raises BrokenPipeError."""
    from elaunch.monitor.watch import require_reader

    def waiting(seconds: float) -> None:
        wait(seconds)
        require_reader()

    return waiting


def _follow_on_terminal(readings: Iterator[WatchReading]) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    from elaunch.monitor.page import styled

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        for reading in readings:
            # The cursor rests on a line of its own, where the terminal's ^C moves nothing.
            live.update(Group(styled(reading.page, console.width), ""), refresh=True)
        live.vertical_overflow = "visible"


def _leave(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)  # what hides the cursor shows it again


@contextmanager
def _quiet_interrupt() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
