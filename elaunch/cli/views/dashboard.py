"""``elaunch dashboard``: the runs of this user as a page in the browser (docs/dashboard.md)."""

from __future__ import annotations

import os

import click

from elaunch.endings import INTERRUPTED


@click.command("dashboard")
@click.argument("run", required=False, metavar="[RUN]")
@click.option(
    "--host", default="127.0.0.1", metavar="ADDRESS", help="Listen here.  [default: 127.0.0.1]"
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Of this port; 0 for any free one.  [default: 8642, or a free one]",
)
@click.option("--token", is_flag=True, help="Ask for a token on loopback too, for other users.")
@click.option(
    "--allow-host", multiple=True, metavar="NAME", help="A name that a proxy calls it by."
)
@click.option(
    "--allow-control",
    is_flag=True,
    help="Let the page of a run stop it, preempt it, and restart its round.",
)
def dashboard(
    run: str | None,
    host: str,
    port: int | None,
    token: bool,
    allow_host: tuple[str, ...],
    allow_control: bool,
) -> int:
    """Show the runs of this user on this machine in the browser, or begin with one RUN.

    The address is printed. Without --allow-control nothing can be changed through it. At another
    address than loopback it asks for a token, which is in the address that is printed.
    """
    from elaunch.dashboard import serving
    from elaunch.runs.directory import find

    found = find(run, os.environ) if run is not None else None
    place = serving.Place(host, port, token, allow_host, allow_control)
    try:
        serving.serve(place, os.environ, found, lambda address: click.echo(address))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
