"""``elaunch status``: how runs stand (docs/status.md).

Without rendezvous flags: this user's runs on this machine, or one of them in detail. With them: a
whole job, as read from the store in which its agents meet.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from elaunch.cli import place as places
from elaunch.endings import INTERRUPTED
from elaunch.errors import UsageError
from elaunch.views.layout import echo_plain, on_terminal, show

if TYPE_CHECKING:
    from elaunch.views.layout import Page


@click.command("status", context_settings={"token_normalize_func": places.normal})
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/status-json.md).")
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
@places.options
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
    if interval is not None and not watching:
        raise UsageError(f"--interval {interval:g} has an effect only with --watch")
    if everything and run is not None:
        raise UsageError(f"--all lists every run: leave out RUN {run!r}, or leave out --all")
    line = places.given(place, run)
    if line and everything:
        raise UsageError(
            f"--all lists runs of this machine, and --{next(iter(line))} asks for a job in a store"
        )
    with _quiet_interrupt(), ExitStack() as stack:
        view = view_of_store(line, stack) if line else view_of_runs(run, everything)
        if not watching:
            _print(view, view.read(), as_json)
            return
        from elaunch.views.watch import changes, require_reader, watch

        def wait(seconds: float) -> None:
            view.wait(seconds)
            require_reader()

        readings = watch(view.read, interval or 1.0, wait)
        if on_terminal() and not as_json:
            _follow_on_terminal(view, readings)
            return
        for number, jobs in enumerate(changes(readings)):
            if as_json:
                click.echo(json.dumps(view.document(jobs)))
                continue
            if number:
                click.echo()
            echo_plain(view.page(jobs))


@click.command("runs")
@click.argument("verb", default="ls", metavar="[ls]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/status-json.md).")
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
        view = view_of_runs(None, everything)
        _print(view, view.read(), as_json)


@dataclass(frozen=True)
class StatusView:
    """A job, or a list of them, that is looked at: how it is read, waited for, and shown."""

    read: Callable[[], Sequence[Any]]
    wait: Callable[[float], None]
    page: Callable[[Sequence[Any]], Page]
    document: Callable[[Sequence[Any]], Any]


def view_of_runs(run: str | None, everything: bool) -> StatusView:
    """Return the view of all runs of this machine, or of one."""
    from elaunch.runs.directory import find
    from elaunch.views import json as documents
    from elaunch.views.page import list_page, run_page
    from elaunch.views.read import RunReader, read_all
    from elaunch.views.watch import pause
    from elaunch.wire.control import WORKERS_S

    if run is None:
        page = partial(list_page, everything=everything)
        return StatusView(partial(read_all, os.environ, everything), pause, page, documents.listed)
    reader = RunReader(find(run, os.environ), first_s=WORKERS_S)
    return _of_one(reader.read, pause, run_page, documents.one_run)


def view_of_store(line: Mapping[str, str], stack: ExitStack) -> StatusView:
    """Return the view of a job, or of several, in the store that the flags name."""
    from elaunch.views import json as documents
    from elaunch.views.page import store_page, stores_page
    from elaunch.views.store import JobStore, read_jobs
    from elaunch.views.watch import pause

    rendezvous, ids = places.jobs(line)
    if len(ids) > 1:
        listed = partial(map, documents.store_job)
        return StatusView(
            partial(read_jobs, rendezvous), pause, stores_page, lambda jobs: list(listed(jobs))
        )
    store = stack.enter_context(closing(JobStore(rendezvous, ids[0])))
    return _of_one(store.read, store.wait, store_page, documents.store_job)


def _of_one(
    read: Callable[[], Any],
    wait: Callable[[float], None],
    page: Callable[[Any], Page],
    document: Callable[[Any], Any],
) -> StatusView:
    return StatusView(
        lambda: (read(),), wait, lambda jobs: page(jobs[0]), lambda jobs: document(jobs[0])
    )


def _print(view: StatusView, jobs: Sequence[Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(view.document(jobs), indent=2))
    else:
        show(view.page(jobs))


def _follow_on_terminal(view: StatusView, readings: Iterator[Sequence[Any]]) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    from elaunch.views.layout import styled

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        for jobs in readings:
            # The cursor rests on a line of its own, where the terminal's ^C moves nothing.
            live.update(Group(styled(view.page(jobs), console.width), ""), refresh=True)
        live.vertical_overflow = "visible"


def _leave(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)  # what hides the cursor shows it again


@contextmanager
def _quiet_interrupt() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
