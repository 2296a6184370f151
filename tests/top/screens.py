"""What a driven screen shows, as text."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

from textual.pilot import Pilot, WaitForScreenTimeout

from elaunch.top.app import TopApp
from tests.launching import Launcher

SECONDS = 60.0


def drawn(pilot: Pilot[None]) -> str:
    """Return the text on the screen, line by line."""
    width, height = pilot.app.size
    strips = pilot.app.screen._compositor.render_strips()
    return "\n".join(strip.crop(0, width).text for strip in strips[:height])


async def press(pilot: Pilot[None], *keys: str) -> None:
    """Press keys.

    Textual then waits until each widget has answered, in vain for one that was replaced meanwhile.
    """
    with contextlib.suppress(WaitForScreenTimeout):
        await pilot.press(*keys)


async def settle(pilot: Pilot[None], delay: float | None = None) -> None:
    """Wait as ``pilot.pause`` does, and as :func:`press` no longer than for what is still there."""
    with contextlib.suppress(WaitForScreenTimeout):
        await pilot.pause(delay)


async def seen(pilot: Pilot[None], *texts: str) -> None:
    """Wait until all of it is on the screen."""
    until = time.monotonic() + SECONDS
    while not all(text in drawn(pilot) for text in texts):
        assert time.monotonic() < until, f"{texts} not in\n{drawn(pilot)}"
        await settle(pilot, 0.05)


async def closed(pilot: Pilot[None]) -> None:
    """Wait until nothing is in the place of the tree: keys go to it from then on."""
    app, until = pilot.app, time.monotonic() + SECONDS
    assert isinstance(app, TopApp)
    while app.pager is not None or app.focused is not app.row_list:
        assert time.monotonic() < until, drawn(pilot)
        await settle(pilot, 0.05)


def run_json(elaunch: Launcher, run: str) -> Any:
    """Return what ``elaunch top --json`` prints."""
    shown = elaunch.run(["top", run, "--json"])
    assert shown.returncode == 0, shown
    return json.loads(shown.stdout)
