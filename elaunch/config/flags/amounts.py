"""Values of the checkpoint flags: sizes in bytes, and which metric is the best; see ``values.py``.

======  =================  ======  ==========
unit    bytes              unit    bytes
======  =================  ======  ==========
KiB, K  1024               KB      1000
MiB, M  1024 ** 2          MB      1000 ** 2
GiB, G  1024 ** 3          GB      1000 ** 3
TiB, T  1024 ** 4          TB      1000 ** 4
======  =================  ======  ==========
"""

from __future__ import annotations

import re
from typing import Literal

_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def size(raw: str) -> int:
    """Return a number of bytes, 1 or more; a unit may stand behind it, in any case."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?b)?|b)?\s*", raw.lower())
    if not found:
        raise ValueError("is not a size such as 512MiB, 8GiB or 1000000000")
    number, power, unit = found.groups()
    factor = (1000 if unit == "b" else 1024) ** _POWERS[power] if power else 1
    total = int(float(number) * factor) if "." in number else int(number) * factor
    if total < 1:
        raise ValueError("is less than 1 byte")
    return total


def best(raw: str) -> tuple[str, Literal["min", "max"]]:
    """Return (metric, ``min`` or ``max``) of ``METRIC``, ``METRIC:min`` or ``METRIC:max``.

    A metric whose name has a colon needs one of them: else ``loss:maximum`` would be a name.
    """
    name, colon, mode = raw.rpartition(":")
    metric = name if colon else raw
    if colon and mode not in ("min", "max"):
        raise ValueError(f"ends with {mode!r} behind the colon, which is neither min nor max")
    if not metric.strip():
        raise ValueError("does not name a metric")
    if not metric.isprintable():
        raise ValueError("has a character in it that cannot be printed")
    return metric, "max" if colon and mode == "max" else "min"
