"""How amounts and times are written for people, and how foreign text is made safe to print."""

from __future__ import annotations

import time
from typing import Final

from elaunch import shown

_DAY_S: Final = 86_400
LONGEST_S: Final = 1e12
"""Seconds of the longest length of time; more means that it is unknown."""


def duration(seconds: float) -> str:
    """Write a length of time: ``0.05 s``, ``12 s``, ``3m 12s``, ``2h 05m``, ``3d 04h``."""
    if not abs(seconds) < LONGEST_S:  # NaN is not below anything
        return "?"
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < _DAY_S:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // _DAY_S}d {whole % _DAY_S // 3600:02d}h"


def memory(count: int) -> str:
    """Write a number of bytes with three digits: ``612 MiB``, ``1.23 GiB``."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 999.5:
            break
        amount, unit = amount / 1024, larger
    if unit == "B" or amount >= 99.95:
        return f"{amount:.0f} {unit}"
    return f"{amount:.1f} {unit}" if amount >= 9.995 else f"{amount:.2f} {unit}"


def moment(at: float, now: float) -> str:
    """Write a time since the epoch in local time: the time of day today, else with the date."""
    then, today = time.localtime(at), time.localtime(now)
    if then[:3] == today[:3]:
        return time.strftime("%H:%M:%S", then)
    return time.strftime("%b %d %H:%M" if then[0] == today[0] else "%Y-%m-%d", then)


def date(at: float) -> str:
    """Write a time since the epoch as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def clean(text: str) -> str:
    """Return ``text`` on one line, with what is not printable (escape sequences) written out."""
    return shown.line(text)
