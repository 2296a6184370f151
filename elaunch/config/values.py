"""The value of a flag's text: one function per kind of value, text in, value out.

The same function reads a value whether it came from the command line, a variable or the job
file. Each raises ``ValueError`` with the end of a sentence that begins with the value
("is not a whole number"); ``flag.convert`` adds the flag and where the value came from.
Nothing here looks at the machine: that is ``checks.py``.

A size is a number of bytes, perhaps with a unit, in any case: KiB or K is 1024, KB 1000, and so on
for M, G and T.

==============================  ==================================================================
``--preempt-at``                moment
==============================  ==================================================================
``+90s`` ``+30m`` ``+3h``       so long after the start of this agent
``2026-11-21T18:00``            a local time, or with an offset (``+01:00``, ``Z``)
``slurm`` ``slurm-5m``          2 minutes, or so long, before the end of the Slurm job
==============================  ==================================================================
"""

from __future__ import annotations

import datetime
import math
import re
import signal
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import urlsplit

TRUE = ("1", "true", "yes", "on", "t", "y")
FALSE = ("0", "false", "no", "off", "f", "n")
DEVICES = ("cpu", "gpu", "auto", "xpu")
# Names under which other accelerators register with torch; only used to recognise a misspelling.
OTHER_DEVICES = ("privateuseone", "npu", "hpu", "mlu", "musa", "mps", "mtia", "maia", "gcu", "sdaa")
# What programs print where they have no value; torch would have to be imported to refuse it.
NO_DEVICES = frozenset("nan inf infinity null none nil undefined true false yes no on off".split())
LARGEST_WHOLE = 2**31 - 1
MOST_SECONDS = 1e9
MOST_NODES = 1_000_000
MOST_WORKERS = 16_384
_POWERS: Final = {"k": 1, "m": 2, "g": 3, "t": 4}
_SLURM_MARGIN: Final = 120.0
_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", "NOTSET", "WARN", "FATAL")


@dataclass(frozen=True)
class StreamMap:
    """Which streams of each local rank are meant: 0 none, 1 stdout, 2 stderr, 3 both."""

    default: int = 0
    ranks: Mapping[int, int] = field(default_factory=dict)

    def of(self, local_rank: int) -> int:
        """Return the streams of one worker as 0, 1, 2 or 3."""
        return self.ranks.get(local_rank, self.default)

    def __bool__(self) -> bool:
        return bool(self.default) or any(self.ranks.values())


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the name of ``names`` that is spelt most like ``name``, or an empty string."""
    import difflib

    if len(name) > 200:  # nothing is near it, and to find that out takes long
        return ""
    folded = {fold(known): known for known in names}
    found = difflib.get_close_matches(fold(name), folded, n=1, cutoff=cutoff)
    return folded[found[0]] if found else ""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest name, or an empty string."""
    found = nearest(name, names)
    return f"; did you mean {found!r}?" if found else ""


def fold(name: str) -> str:
    """Return a name as it is compared: lower case, ``-`` for ``_``."""
    return name.lower().replace("_", "-")


def unfit(raw: str) -> str:
    """Return why no argument or variable of a process can be this text; "" where one can."""
    if "\0" in raw:
        return "has a NUL character in it"
    try:
        raw.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return "has a character in it that is half of a pair (a lone surrogate)"
    return ""


def text(raw: str) -> str:
    """Return the value as it is."""
    return raw


def label(raw: str) -> str:
    """Return a name that is printed in logs and tables: not empty, one line, not long."""
    if not raw.strip():
        raise ValueError("is empty")
    if not raw.isprintable():
        raise ValueError("has a character in it that cannot be printed")
    if len(raw.encode()) > 200:
        raise ValueError("is longer than 200 bytes")
    return raw


def label_or_empty(raw: str) -> str:
    """Return a role or a run id.

    TorchX gives an empty role to every job; an empty run id asks for a fresh one, as under
    torchrun.
    """
    return label(raw) if raw else raw


def switch(raw: str) -> bool:
    """Return a yes or a no; any integer is taken, as torchrun takes it in PET_ variables."""
    word = raw.strip().lower()
    if word in TRUE or word in FALSE:
        return word in TRUE
    try:
        return bool(int(word))
    except ValueError:
        hint = did_you_mean(word, ("true", "false", "yes", "no"))
        raise ValueError(f"is neither yes nor no{hint}") from None


def choice(names: tuple[str, ...]) -> Callable[[str], str]:
    """Return the reader of a value that must be one of ``names``."""

    def read(raw: str) -> str:
        if raw not in names:
            folded = {fold(name): name for name in names}
            if fold(raw) not in folded:
                raise ValueError(f"is not known{did_you_mean(raw, names)}")
            return folded[fold(raw)]
        return raw

    return read


def whole(minimum: int, maximum: int = LARGEST_WHOLE) -> Callable[[str], int]:
    """Return the reader of an integer with limits."""

    def read(raw: str) -> int:
        number = _integer(raw)
        if number < minimum:
            raise ValueError(f"is less than {minimum}")
        if number > maximum:
            raise ValueError(f"is more than {maximum}")
        return number

    return read


def seconds(raw: str) -> float:
    """Return a duration in seconds, 0 or more: of a number, or of one with a unit (30m)."""
    match = _DURATION.fullmatch(raw.strip())
    try:
        number = float(raw) if match is None else float(match[1]) * _UNITS[match[2]]
    except ValueError:
        raise ValueError("is not a number of seconds, nor one with a unit: 90s, 30m, 3h") from None
    if not math.isfinite(number):
        raise ValueError("is not a finite number of seconds")
    if number < 0:
        raise ValueError("is less than 0 seconds")
    if number > MOST_SECONDS:
        raise ValueError(f"is more than {MOST_SECONDS:.0f} seconds (31 years)")
    return number


def positive_seconds(raw: str) -> float:
    """Return a duration in seconds, more than 0."""
    number = seconds(raw)
    if number == 0:
        raise ValueError("is not more than 0 seconds")
    return number


def hang_timeout(raw: str) -> float | Literal["auto"] | None:
    """Return how long nothing may move, in seconds; None for ``off``."""
    word = raw.strip().lower()
    if word in ("off", "none", "no"):
        return None
    if word == "auto":
        return "auto"
    try:
        number = seconds(raw)
    except ValueError as error:
        raise ValueError(f"{error}; auto and off are the other values") from None
    if number == 0:
        raise ValueError("is not more than 0 seconds; off switches it off")
    return number


def pattern(raw: str) -> str:
    """Return a regular expression that compiles; its one group, if any, is a step."""
    if not raw:
        raise ValueError("is empty, and would match every line")
    import regex  # for those alone who give a pattern

    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # what a later version may read otherwise
            compiled = regex.compile(raw)
    except (regex.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    if compiled.groups > 1:
        raise ValueError(
            f"has {compiled.groups} groups; one at most, the step's number: write (?:…) for others"
        )
    return raw


def nnodes(raw: str) -> tuple[int, int]:
    """Return (MIN, MAX) of ``N`` or ``MIN:MAX``."""
    parts = raw.split(":")
    if len(parts) > 2:
        raise ValueError("is not of the form N or MIN:MAX")
    low, high = _integer(parts[0]), _integer(parts[-1])
    if low < 1:
        raise ValueError("asks for fewer than 1 node")
    if low > high:
        raise ValueError(f"has a MIN ({low}) larger than its MAX ({high})")
    if high > MOST_NODES:
        raise ValueError(f"asks for more than {MOST_NODES} nodes")
    return low, high


def nproc(raw: str) -> str:
    """Return a number of workers per node, or the name of the device to count, as text."""
    word = raw.strip()
    known = DEVICES + OTHER_DEVICES
    if word in known:
        return word
    if word.lower() == "cuda":
        raise ValueError("is not a device to count; did you mean 'gpu'?")
    if word.lower() in NO_DEVICES or nearest(word.lower(), sorted(NO_DEVICES), cutoff=0.8):
        raise ValueError("is neither a number nor a device to count")
    if word and re.fullmatch(r"[A-Za-z_]\w{,31}", word):
        # A plug-in of torch may register an accelerator of any other name (checks.counted).
        if nearest(word, known, cutoff=0.7):
            raise ValueError(f"is not a device to count{did_you_mean(word, known)}")
        return word
    number = _integer(word)
    if number < 1:
        raise ValueError("is not at least 1 worker")
    if number > MOST_WORKERS:
        raise ValueError(f"is more than {MOST_WORKERS} workers on one node")
    return str(number)


def streams(raw: str) -> StreamMap:
    """Return the streams of ``0|1|2|3`` or of ``local_rank:streams,local_rank:streams``."""
    if re.fullmatch(r"[0-3]", raw.strip()):
        return StreamMap(int(raw))
    ranks: dict[int, int] = {}
    for pair in raw.split(","):
        found = re.fullmatch(r"\s*([0-9]+):([0-3])\s*", pair)
        if not found:
            raise ValueError("is neither 0, 1, 2 or 3 nor of the form RANK:STREAMS,RANK:STREAMS")
        ranks[int(found[1])] = int(found[2])
    return StreamMap(0, ranks)


def ranks(raw: str) -> frozenset[int] | None:
    """Return the local ranks of a comma-separated list, or None for an empty one."""
    if not raw.strip():
        return None
    return frozenset(whole(0)(part) for part in raw.split(","))


def words(raw: str) -> tuple[str, ...]:
    """Return the items of a comma-separated list; ``,,`` stands for a comma inside an item."""
    parts = raw.replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


def modules(raw: str) -> tuple[str, ...]:
    """Return the module names of a comma-separated list; ``none`` stands for an empty one.

    A ``+`` before a name stays: the module is to be imported later.
    """
    if raw.strip().lower() in ("none", ""):
        return ()
    names = tuple(name.strip() for name in raw.split(","))
    for name in names:
        if not all(part.isidentifier() for part in name.removeprefix("+").split(".")):
            raise ValueError(f"has {name!r} in it, which is not the name of a module")
    return names


def signals(raw: str) -> tuple[signal.Signals, ...]:
    """Return the signals of a comma-separated list of names, with or without SIG."""
    if not raw.strip():
        return ()
    found: list[signal.Signals] = []
    for part in raw.split(","):
        number = _signal(part.strip())
        if number not in found:
            found.append(number)
    return tuple(found)


def _signal(name: str) -> signal.Signals:
    word = name.upper()
    word = word if word.startswith("SIG") else f"SIG{word}"
    known = {each.name: each for each in signal.Signals}
    if word not in known:
        raise ValueError(f"has the unknown signal {name!r}{did_you_mean(word, known)}")
    if word in ("SIGKILL", "SIGSTOP"):
        raise ValueError(f"has {word} in it, which no process can handle")
    if word in ("SIGCHLD", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"):
        raise ValueError(f"has {word} in it, which the agent needs for itself")
    return known[word]


def log_level(raw: str) -> str:
    """Return the name of a log level in upper case."""
    word = raw.strip().upper()
    if word not in LOG_LEVELS:
        raise ValueError(f"is not a log level{did_you_mean(word, LOG_LEVELS)}")
    return {"WARN": "WARNING", "FATAL": "CRITICAL"}.get(word, word)


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


def hook(raw: str) -> str:
    """Return a command of the shell, or a URL that has a host."""
    found = raw.strip()
    if not found:
        raise ValueError("is empty")
    if re.match(r"https?:", found, re.IGNORECASE):
        try:
            url = urlsplit(found)
            host, _ = url.hostname, url.port
            found = url.scheme + found[len(url.scheme) :]
        except ValueError as error:
            raise ValueError(f"is no URL: {error}") from None
        if not host or not found.isprintable() or " " in found:
            raise ValueError("is no URL of a host, such as https://host/path")
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", found):
        raise ValueError("has a scheme that is neither http nor https")
    return found


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


@dataclass(frozen=True)
class Moment:
    """A moment as given: ``after`` the start, ``at`` a time, or ``before_end`` of Slurm's job.

    One is set, ``at`` besides ``before_end`` once it is known; in seconds, ``at`` since the epoch.
    """

    after: float | None = None
    at: float | None = None
    before_end: float | None = None


def moment(raw: str) -> Moment:
    """Return the moment that a text names; ValueError ends a sentence that begins with it."""
    word = raw.strip()
    if word.startswith("+"):
        return Moment(after=duration(word[1:]))
    if word == "slurm" or word.startswith("slurm-"):
        return Moment(before_end=duration(word[6:]) if word != "slurm" else _SLURM_MARGIN)
    try:
        found = datetime.datetime.fromisoformat(re.sub("Z$", "+00:00", word))
    except ValueError:
        hint = f"; did you mean '+{word}'?" if _DURATION.fullmatch(word) else ""
        raise ValueError(f"is no moment{hint}") from None
    return Moment(at=found.timestamp())


def duration(text: str) -> float:
    """Return the seconds of 90, 90s, 30m, 3h or 2d; ValueError ends a sentence about the value."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"has {text!r} in it, which is no duration such as 90s, 30m, 3h")
    return float(match[1]) * _UNITS[match[2]]


def _integer(raw: str) -> int:
    try:
        return int(raw)
    except ValueError:
        raise ValueError("is not a whole number") from None
