"""Text for people: what others wrote made safe to print, secrets hidden, numbers in words.

================  ==================================================================================
``one_line``      one line; whatever is not printable is written out: escapes, control characters
                  (C0 and C1), line breaks, marks that turn the direction of text, surrogates
``block``         the same for each of several lines; tabs stay
``arguments``     a command's arguments without the values of options that are secret by their names
``count``         1 node, 3 nodes
``listed``        a, b, c and 4 more
``ranks``         rank 3; ranks 0-2, 5
``ranks_do``      rank 3 has; ranks 0-2, 5 have
``size``          612 MiB, 1.23 GiB
``duration``      0.05 s, 12 s, 3m 12s, 2h 05m, 3d 04h
``moment``        a time of day, or a date
================  ==================================================================================

Everything passes through here that comes from another machine, a worker, a store, a file or the
name of one, and is printed among elaunch's own lines. What workers write to their own streams is
theirs, and is not touched.
"""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final

HIDDEN: Final = "(hidden)"
_SECRET: Final = re.compile(
    r"secret|passw|passphrase|credential|api[-_]?key|access[-_]?key|private[-_]?key", re.IGNORECASE
)
_SECRET_WORDS: Final = frozenset(("auth", "cred", "key", "pass", "private", "pw", "pwd"))
_NOT_SECRET: Final = frozenset(("dir", "file", "name", "path"))
"""Last words of names whose values say where a secret is, and are none."""
_DAY_S: Final = 86_400
LONGEST_S: Final = 1e12
"""Seconds of the longest length of time; more means that it is unknown."""
_MOST: Final = 16
_SINGULAR: Final = {"have": "has", "are": "is", "do": "does"}


def one_line(text: str) -> str:
    """Return ``text`` on one line, with what is not printable written out."""
    if text.isprintable():
        return text
    return "".join(char if _is_plain(char) else ascii(char)[1:-1] for char in text)


def _is_plain(char: str) -> bool:
    """Return whether a character is printed as itself; blanks of any width are."""
    return char.isprintable() or unicodedata.category(char) == "Zs"


def block(text: str) -> str:
    """Return ``text`` in the lines that it has, with what else is not printable written out."""
    lines = text.split("\n")
    return "\n".join("\t".join(one_line(part) for part in one.split("\t")) for one in lines)


def arguments(words: Iterable[str]) -> list[str]:
    """Return the words of a command line, with ``(hidden)`` for values that look secret.

    ``--api-key VALUE``, ``--api-key=VALUE`` and ``wandb.token=VALUE`` are such.
    """
    found: list[str] = []
    follows = False
    for word in words:
        name, equals, _ = word.partition("=")
        option = name.startswith("-")
        if follows and not word.startswith("--"):
            found.append(HIDDEN)
            follows = False
        elif equals and is_secret(name):
            found.append(f"{name}={HIDDEN}")
            follows = False
        else:
            found.append(word)
            follows = option and not equals and is_secret(name)
    return found


def is_secret(name: str) -> bool:
    """Return whether an option or a variable of that name looks as if its value were secret."""
    words = [word for word in re.split(r"[^a-z]+", name.lower()) if word]
    if not words or words[-1] in _NOT_SECRET or len(name) > 200:
        return False
    named = words[-1] in _SECRET_WORDS or any(word.endswith("token") for word in words)
    return named or _SECRET.search(name) is not None


def count(number: int, word: str = "node") -> str:
    """Return "1 node" or "3 nodes"."""
    return f"1 {word}" if number == 1 else f"{number} {word}s"


def shortened(text: str, most: int) -> str:
    """Return a text of at most ``most`` characters: one that is longer ends in an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def listed(names: Sequence[str], most: int = 8, between: str = ", ") -> str:
    """Return the names with commas, at most ``most`` of them, and how many more there are."""
    more = len(names) - most
    return between.join(names[:most]) + (f" and {more} more" if more > 0 else "")


def host_port(host: str, port: int | None) -> str:
    """Return ``host:port``, an IPv6 address in brackets; without a port the host alone."""
    shown = f"[{host}]" if ":" in host else host
    return shown if port is None else f"{shown}:{port}"


def ranks(numbers: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5, 6", with at most 16 ranks and spans of three or more."""
    known = sorted(numbers)
    spans: list[list[int]] = []
    for rank in known:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    short = [[span] if len(span) > 2 else [[rank] for rank in span] for span in spans]
    parts = [part for each in short for part in each]
    words = [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts[:_MOST]]
    more = sum(map(len, parts[_MOST:]))
    behind = f" and {more} more" if more else ""
    return f"{'rank' if len(known) == 1 else 'ranks'} {', '.join(words)}{behind}"


def ranks_do(numbers: Iterable[int], verb: str) -> str:
    """Return "rank 3 has" or "ranks 0-2 have" of the verb "have"."""
    known = sorted(numbers)
    singular = _SINGULAR.get(verb, f"{verb}s")
    return f"{ranks(known)} {singular if len(known) == 1 else verb}"


def on_ranks(values: Iterable[tuple[int, object]]) -> list[str]:
    """Return "120 on ranks 0-3" and "121 on rank 4" of what each rank has."""
    having: dict[str, list[int]] = {}
    for rank, value in values:
        having.setdefault(str(value), []).append(rank)
    return [f"{value} on {ranks(of)}" for value, of in having.items()]


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


def size(count: float) -> str:
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
