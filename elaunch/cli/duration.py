"""Options that take a duration: 90, 1.5h, 30m, 2d."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import click

from elaunch.config import values

DAY_S: Final = 86_400

Callback = Callable[[click.Context, click.Parameter, str | None], float | None]


def up_to(most: float) -> Callback:
    """Return the callback of an option: it gives the seconds, ``most`` of them at the most."""

    def convert(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
        if value is None:
            return None
        try:
            seconds = values.duration(value.strip())
        except ValueError:
            fault = f"{value!r} is no duration such as 90, 30m, 4h or 2d"
            raise click.BadParameter(fault) from None
        if seconds > most:
            raise click.BadParameter(f"{value!r} is longer than {most / DAY_S:.0f} days")
        return seconds

    return convert
