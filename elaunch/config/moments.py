"""When a run is to end, to be continued: ``--preempt-at``.

==============================  ==================================================================
text                            moment
==============================  ==================================================================
``+90s`` ``+30m`` ``+3h``       so long after the start of this agent
``2026-11-21T18:00``            a local time, or with an offset (``+01:00``, ``Z``)
``slurm`` ``slurm-5m``          2 minutes, or so long, before the end of the Slurm job, as
                                SLURM_JOB_END_TIME gives it (seconds since the epoch)
==============================  ==================================================================
"""

from __future__ import annotations

import datetime
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

SLURM_END: Final = "SLURM_JOB_END_TIME"
SLURM_MARGIN: Final = 120.0
_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")


@dataclass(frozen=True)
class Moment:
    """A moment as given: ``after`` the start, ``at`` a time, or ``before_end`` of Slurm's job.

    Exactly one is set; in seconds, ``at`` since the epoch.
    """

    after: float | None = None
    at: float | None = None
    before_end: float | None = None


def moment(raw: str) -> Moment:
    """Return the moment that a text names; ValueError ends a sentence that begins with it."""
    word = raw.strip()
    if word.startswith("+"):
        return Moment(after=_duration(word[1:]))
    if word == "slurm" or word.startswith("slurm-"):
        return Moment(before_end=_duration(word[6:]) if word != "slurm" else SLURM_MARGIN)
    try:
        found = datetime.datetime.fromisoformat(re.sub("Z$", "+00:00", word))
    except ValueError:
        hint = f"; did you mean '+{word}'?" if _DURATION.fullmatch(word) else ""
        raise ValueError(f"is no moment{hint}") from None
    return Moment(at=found.timestamp())


def _duration(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"has {text!r} in it, which is no duration such as 90s, 30m, 3h")
    return float(match[1]) * _UNITS[match[2]]


def resolved(given: Moment, environ: Mapping[str, str]) -> float:
    """Return the moment in seconds since the epoch; ValueError if it is unknown or is over."""
    now = time.time()
    if given.after is not None:
        return now + given.after
    at = given.at if given.before_end is None else _slurm_end(environ) - given.before_end
    assert at is not None  # one of the three is set
    if at <= now:
        raise ValueError(f"was {now - at:.0f} s ago")
    return at


def _slurm_end(environ: Mapping[str, str]) -> float:
    text = environ.get(SLURM_END, "")
    if not text:
        raise ValueError(
            f"needs the variable {SLURM_END}, which Slurm 22.05 and later sets in a job"
        )
    try:
        end = float(text)
    except ValueError:
        end = math.nan
    if not math.isfinite(end):
        raise ValueError(f"needs {SLURM_END} in seconds, and it is {text!r}")
    return end
