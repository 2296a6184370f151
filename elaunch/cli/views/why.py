"""``elaunch why`` and ``elaunch explain``: why a run failed, and what a code means.

docs/failure-report.md and docs/errors.md.
"""

from __future__ import annotations

import difflib
import json
import os
from contextlib import ExitStack

import click

from elaunch.cli import place as places
from elaunch.errors import RunDirError, UsageError


@click.command("why", context_settings={"token_normalize_func": places.normal})
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--round", "number", type=click.IntRange(min=0), metavar="N", help="Show this round.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/failure-json.md).")
@places.options
def why(run: str | None, number: int | None, as_json: bool, **place: str | None) -> None:
    """Show why RUN failed: its newest failed round, which rank caused it, and what to do.

    The command works while the job runs, after it ended, and after its agent was killed. RUN is a
    run id of this machine, the beginning of one, or a run directory; without it, the newest run.
    With --rdzv-backend and --rdzv-endpoint: a job in a store, from any machine that reaches it; the
    report is there while the job goes on.
    """
    from elaunch.runs import directory
    from elaunch.views import failures
    from elaunch.views.read import read as read_run

    if line := places.given(place, run):
        with ExitStack() as stack:
            in_store = failures.read_job(places.agents(line, stack), number)
        document = in_store.to_dict()
        click.echo(json.dumps(document, indent=2) if as_json else "\n".join(in_store.lines()))
        return
    found = directory.named(run, os.environ)
    try:
        read = failures.read_cards(read_run(found), number)
    except OSError as error:
        raise RunDirError(f"cannot read {found.path}: {error.strerror}") from None
    except LookupError as error:
        there = f"those that have: {error}" if str(error) else "no round has failed"
        raise UsageError(f"--round {number}: there is no failure report; {there}") from None
    if not as_json:
        click.echo("\n".join(failures.lines(read)))
        return
    try:
        click.echo(json.dumps(read.to_dict(), indent=2))
    except RecursionError:
        raise RunDirError(f"a failure report in {found.path} is nested too deeply") from None


@click.command("explain")
@click.argument("code", required=False, metavar="[CODE]")
def explain(code: str | None) -> None:
    """Explain a CODE such as E-SHM-FULL, and what to do; without CODE, list all.

    Failure reports and error messages have these codes; docs/errors.md has them on one page.
    """
    from elaunch.agent.failure import explain as catalogue

    if code is None:
        width = max(map(len, catalogue.CAUSES))
        for name, cause in catalogue.CAUSES.items():
            click.echo(f"{name:<{width}}  {catalogue.sentence(cause)}")
        return
    name = code.upper()
    found = catalogue.CAUSES.get(name) or catalogue.CAUSES.get(f"E-{name}")
    if found is None:
        near = difflib.get_close_matches(name[:80], catalogue.CAUSES, n=3, cutoff=0.4)
        hint = f"the nearest: {', '.join(near)}" if near else "`elaunch explain` lists all"
        raise UsageError(f"no code {code!r}; {hint}")
    click.echo(catalogue.part(found), nl=False)
