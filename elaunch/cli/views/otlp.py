"""``elaunch otlp``: how runs stand, for an OpenTelemetry collector (docs/dashboard.md)."""

from __future__ import annotations

import os

import click

from elaunch.endings import INTERRUPTED
from elaunch.errors import UsageError


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
        from elaunch.dashboard.otlp import export
    except ModuleNotFoundError as error:
        raise UsageError(f"OTLP needs {error.name}: pip install 'elaunch[otlp]'") from None
    try:
        return 0 if export(os.environ, found, _warn) else 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _warn(text: str) -> None:
    click.echo(f"elaunch: {text}", err=True)
