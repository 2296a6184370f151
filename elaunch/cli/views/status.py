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
from types import FrameType
from typing import TYPE_CHECKING

import click

from elaunch.cli import place as places
from elaunch.endings import INTERRUPTED
from elaunch.errors import UsageError
from elaunch.views.layout import echo_plain, on_terminal, show

if TYPE_CHECKING:
    from elaunch.config.rendezvous import RendezvousSettings
    from elaunch.monitor.watch import Read, WatchReading
    from elaunch.runs.directory import RunDir
    from elaunch.runs.job import Job
    from elaunch.views.store import JobStore

Wait = Callable[[float], None]


@click.command("status", context_settings={"token_normalize_func": places.normal})
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
    _refuse_idle_flags(run, watching, interval, everything)
    line = places.given(place, run)
    _refuse_all(everything, line)
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


def _refuse_all(everything: bool, line: Mapping[str, str]) -> None:
    if line and everything:
        raise UsageError(
            f"--all lists runs of this machine, and --{next(iter(line))} asks for a job in a store"
        )


def _reader(run: str | None, everything: bool) -> tuple[Read, Wait]:
    from elaunch.monitor.watch import pause
    from elaunch.runs.directory import find

    if run is None:
        return list_reader(os.environ, everything), pause
    return run_reader(find(run, os.environ)), pause


def run_reader(run: RunDir) -> Read:
    """Return what reads one run; RunDirError where it cannot be read."""
    from elaunch.monitor.watch import WatchReading
    from elaunch.views import json as documents
    from elaunch.views.page import run_page
    from elaunch.views.read import RunReader
    from elaunch.wire.control import WORKERS_S

    reader = RunReader(run)

    def read(last: WatchReading | None) -> WatchReading:
        job = reader.read(patience=WORKERS_S if last is None else None)
        return WatchReading(run_page(job), documents.one_run(job), _gist(job), job.live)

    return read


def list_reader(environ: Mapping[str, str], everything: bool) -> Read:
    """Return what reads all runs."""
    from elaunch.monitor.watch import WatchReading
    from elaunch.views import json as documents
    from elaunch.views.page import list_page
    from elaunch.views.read import read_all

    def read(last: WatchReading | None) -> WatchReading:
        jobs = read_all(environ, everything)
        gist = tuple(
            (job.run, job.state, job.agent, job.reason, job.record and job.record["round"])
            for job in jobs
        )
        live = any(job.live for job in jobs)
        return WatchReading(list_page(jobs, everything), documents.listed(jobs), gist, live)

    return read


def _gist(job: Job) -> object:
    record = job.known
    workers = tuple((w.record["pid"], w.state, w.record["exit"]) for w in job.workers)
    latest = job.latest and (job.latest.path, job.latest.step)
    how = (job.state, job.agent, job.reason, record["round"], "awaited" in record)
    return how, tuple(record["restarts"].items()), workers, latest


def _job_reader(line: Mapping[str, str], stack: ExitStack) -> tuple[Read, Wait]:
    """Return what reads a job, or several, in the store that the flags name."""
    from elaunch.monitor.watch import pause
    from elaunch.views.store import JobStore

    rendezvous, ids = places.jobs(line)
    if len(ids) > 1:
        return jobs_reader(rendezvous, ids), pause
    store = stack.enter_context(closing(JobStore(rendezvous, ids[0])))
    return job_reader(store), store.wait


def job_reader(store: JobStore) -> Read:
    """Return what reads a job in its store."""
    from elaunch.monitor.watch import WatchReading
    from elaunch.views import json as documents
    from elaunch.views.page import store_page

    def read(last: WatchReading | None) -> WatchReading:
        job = store.read()
        return WatchReading(store_page(job), documents.store_job(job), job.gist, job.live)

    return read


def jobs_reader(rendezvous: RendezvousSettings, ids: Sequence[str]) -> Read:
    """Return what reads all jobs of an etcd; ``ids`` are those that are there to begin with."""
    from elaunch.monitor.watch import WatchReading
    from elaunch.views import json as documents
    from elaunch.views.page import stores_page
    from elaunch.views.store import read_jobs, run_ids

    def read(last: WatchReading | None) -> WatchReading:
        jobs = read_jobs(rendezvous, ids if last is None else run_ids(rendezvous))
        gist, live = [job.gist for job in jobs], any(job.live for job in jobs)
        return WatchReading(stores_page(jobs), list(map(documents.store_job, jobs)), gist, live)

    return read


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

    from elaunch.views.layout import styled

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
