"""``elaunch stacks``: where the workers of a running job are (docs/status.md)."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import click

from elaunch import text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elaunch.monitor.nodeviews import JobStacks

SILENT = 69
"""Exit code where nothing is known of some node or rank."""


@click.command("stacks")
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--native", is_flag=True, help="Frames of C and C++, too (py-spy).")
@click.option("--locals", "values", is_flag=True, help="The frames' variables, too (py-spy).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/status.md).")
def stacks(run: str | None, native: bool, values: bool, as_json: bool) -> int:
    """Show the Python stacks of all ranks of RUN, on all its nodes, and change nothing.

    Ranks whose main threads are at the same place are one group; the smallest groups come first.
    RUN is a run id of this machine, or the beginning of one; without it the newest run.
    """
    from elaunch.monitor.nodeviews import stacks_of
    from elaunch.runs import directory

    options = [name for name, on in (("--native", native), ("--locals", values)) if on]
    found = directory.newest(os.environ) if run is None else directory.find(run, os.environ)
    taken = stacks_of(found, options)
    if as_json:
        click.echo(json.dumps(taken.to_dict(), indent=2))
    else:
        click.echo("\n".join(text.block(line) for line in _lines(taken)))
    return SILENT if taken.silent or taken.problems else 0


def _lines(taken: JobStacks) -> Iterator[str]:
    for group in taken.groups:
        yield f"{text.ranks(group.ranks)}:"
        values = dict(group.values)
        for frame in group.main:
            yield f"  {frame}"
            yield from (f"      {value}" for value in values.get(frame, ()))
        for ranks, stack in group.threads:
            yield f"  another thread of {text.ranks(ranks)}:"
            yield from (f"    {frame}" for frame in stack)
    for ranks, why in taken.problems:
        yield f"no stacks of {text.ranks(ranks)}: {why}"
    for node, why in taken.silent:
        yield f"no stacks of node {node}: {why}"
    if not (taken.groups or taken.problems or taken.silent):
        yield "no worker runs now"
