"""``elaunch dashboard`` and ``elaunch otlp``: runs in the browser and for a collector.

docs/dashboard.md describes both.
"""

from __future__ import annotations

import os

import click

from elaunch.endings import INTERRUPTED
from elaunch.errors import UsageError


@click.command("dashboard")
@click.argument("run", required=False, metavar="[RUN]")
@click.option(
    "--host",
    default="127.0.0.1",
    metavar="ADDRESS",
    help="Address to listen on.  [default: 127.0.0.1]",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Port to listen on; 0: a free one.  [default: 8642, or a free one]",
)
@click.option(
    "--token", is_flag=True, help="Ask for a token on loopback, too, so that other users may look."
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="Host name that a proxy uses for it; may be given again.",
)
@click.option(
    "--allow-control",
    is_flag=True,
    help="Add buttons that restart, preempt and stop a run.",
)
def dashboard(
    run: str | None,
    host: str,
    port: int | None,
    token: bool,
    allow_host: tuple[str, ...],
    allow_control: bool,
) -> int:
    """Show the runs of this user on this machine in the browser; RUN is shown first.

    The command prints the address. Without --allow-control the pages change nothing. At an address
    other than loopback they ask for a token, which is part of the printed address.
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


@click.command("otlp")
@click.argument("run", required=False, metavar="[RUN]")
def otlp(run: str | None) -> int:
    """Send metrics and traces of this user's runs on this machine to an OpenTelemetry collector.

    A trace is one run, with a span for each round. The command sends until Ctrl-C, or until RUN has
    ended. OTEL_EXPORTER_OTLP_ENDPOINT and the other standard variables name the collector.
    """
    from elaunch.runs.directory import find

    found = find(run, os.environ) if run is not None else None
    try:
        from elaunch.extras.otlp import export
    except ModuleNotFoundError as error:
        raise UsageError(f"OTLP needs {error.name}: pip install 'elaunch[otlp]'") from None
    try:
        return 0 if export(os.environ, found, _warn) else 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _warn(text: str) -> None:
    click.echo(f"elaunch: {text}", err=True)
