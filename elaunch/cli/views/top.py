"""``elaunch top``: one run as a tree on a terminal that stays open (docs/top.md)."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

import click

from elaunch.errors import UsageError
from elaunch.views.layout import on_terminal


@click.command("top")
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--json", "as_json", is_flag=True, help="Print the tree once (docs/top.md).")
@click.pass_context
def top(ctx: click.Context, run: str | None, as_json: bool) -> int | None:
    """Watch RUN as a tree of its nodes and ranks, the worst first; ? shows the keys.

    The command only reads, and works while the job runs, after it ended, and after its agent was
    killed. RUN is a run id of this machine, the beginning of one, or a run directory; without it,
    the newest run.
    """
    from elaunch.runs import directory

    found = directory.named(run, os.environ)
    if as_json:
        from elaunch.views import json as documents
        from elaunch.views.read import RunReader
        from elaunch.wire.control import WORKERS_S

        job = RunReader(found, screen=True, first_s=WORKERS_S).read()
        click.echo(json.dumps(documents.tree(job), indent=2))
        return None
    if not (on_terminal() and sys.stdin is not None and sys.stdin.isatty()):
        raise UsageError(
            "top draws on a terminal: `elaunch top --json` prints the tree once, "
            "`elaunch status RUN --watch` follows it in lines"
        )
    if importlib.util.find_spec("textual") is None:
        from elaunch.cli import place
        from elaunch.cli.views.status import status

        text = "elaunch: note: this is `elaunch status --watch`; the tree takes textual: "
        click.echo(f"{text}pip install 'elaunch[top]'", err=True)
        ctx.invoke(
            status, run=str(found.path), watching=True, **{flag.dest: None for flag in place.FLAGS}
        )
        return None
    from elaunch.top.app import TopApp
    from elaunch.top.pages import TopReader

    app = TopApp(TopReader(found))
    app.run()
    return int(app.return_code or 0)
