"""Pages on stdout: coloured and folded on a terminal, plain in files and pipes."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from elaunch.monitor.page import Page


def on_terminal() -> bool:
    """Return whether stdout is a terminal on which rich can draw."""
    encoding = (sys.stdout.encoding or "").lower()
    return (
        sys.stdout.isatty()
        and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        and encoding.startswith("utf")
    )


def show(page: Page) -> None:
    """Print a page once."""
    if not on_terminal():
        echo_plain(page)
        return
    from rich.console import Console

    from elaunch.monitor.render import styled

    console = Console()
    console.print(styled(page, console.width))


def echo_plain(page: Page) -> None:
    """Print a page as plain text; what stdout's encoding has no character for is written out."""
    from elaunch.monitor.render import plain

    encoding = sys.stdout.encoding or "utf-8"
    text = plain(page).encode(encoding, "backslashreplace").decode(encoding)
    click.echo(text, nl=False)
