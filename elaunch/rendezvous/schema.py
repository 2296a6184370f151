"""What the fields of the records of a rendezvous may hold: one table for agents, one for plans.

A value of the wrong type, out of range, too long, or with control characters where one line is
meant is refused by elaunch.rendezvous.records, which uses these tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from elaunch.rendezvous.plan import AgentState, Cause, Phase, Preempted

MAX_SHORT: Final = 1_000
MAX_TEXT: Final = 60_000
MOST_FREE: Final = 5_000
"""Characters of a free text that this agent writes; three of them fit into a record."""
MAX_ENTRIES: Final = 100
MAX_INT: Final = 2**53


@dataclass(frozen=True)
class Kind:
    """What a value must be: in words, and the test."""

    words: str
    fits: Callable[[Any], bool]


CONTROL = re.compile("[\x00-\x1f\x7f\u2028\u2029\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def _integer(least: int = -MAX_INT, most: int = MAX_INT) -> Kind:
    def fits(value: Any) -> bool:
        return type(value) is int and least <= value <= most

    return Kind(f"an integer from {least} to {most}", fits)


def _one_of(values: tuple[str, ...]) -> Kind:
    return Kind(f"one of {', '.join(map(repr, values))}", lambda value: value in values)


def _or_none(kind: Kind) -> Kind:
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.fits(value))


def _object(schema: Mapping[str, Kind], required: tuple[str, ...]) -> Kind:
    def fits(value: Any) -> bool:
        if type(value) is not dict or any(name not in value for name in required):
            return False
        return all(name in schema and schema[name].fits(item) for name, item in value.items())

    return Kind(f"an object with {', '.join(schema)}", fits)


def is_short(value: Any) -> bool:
    """Return whether it is one line of at most MAX_SHORT characters."""
    return type(value) is str and len(value) <= MAX_SHORT and not CONTROL.search(value)


def _is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= MAX_TEXT and not _SURROGATE.search(value)


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1e9  # which NaN is not


def _is_facts(value: Any) -> bool:
    if type(value) is not dict or len(value) > MAX_ENTRIES:
        return False
    return all(is_short(name) and is_short(fact) for name, fact in value.items())


def _is_names(value: Any) -> bool:
    return type(value) is list and all(map(is_short, value))


_SHORT = Kind(f"one line of at most {MAX_SHORT} characters", is_short)
_TEXT = Kind(f"text of at most {MAX_TEXT} characters", _is_text)
_ROUND = _integer(-1)
_COUNT = _integer(0)
_PORT = _integer(0, 65535)
_SLOTS = _integer(0, 1_000_000)
_CODE = _or_none(_integer(0, 255))
_SWITCH = Kind("true or false", lambda value: type(value) is bool)
_NAMES = Kind("a list of names", _is_names)

_FAILURE = _object(
    {
        "rank": _ROUND,
        "local_rank": _ROUND,
        "host": _SHORT,
        "pid": _COUNT,
        "exitcode": _integer(-1_000_000, 1_000_000),
        "text": _TEXT,
        "age": Kind("seconds", _is_seconds),
        "node": _SHORT,
        "summary": _TEXT,
    },
    required=("rank", "exitcode"),
)
_CHECKPOINT = _object(
    {"path": _TEXT, "step": _integer(), "format": _SHORT}, required=("path", "step", "format")
)
_SEEN = _object(
    {
        "job": _SHORT,
        "phase": _one_of(get_args(Phase)),
        "round": _ROUND,
        "restarts": _COUNT,
        "without_progress": _COUNT,
        "step": _or_none(_integer()),
        "lost": _SWITCH,
    },
    required=("job", "phase", "round"),
)

AGENT: Final[Mapping[str, Kind]] = {
    "host": _SHORT,
    "addr": _SHORT,
    "port": _PORT,
    "slots": _SLOTS,
    "role": _SHORT,
    "hint": _or_none(_integer(0)),
    "facts": Kind("an object of short texts", _is_facts),
    "state": _one_of(get_args(AgentState)),
    "round": _ROUND,
    "failure": _or_none(_FAILURE),
    "reason": _TEXT,
    "exit_code": _CODE,
    "note": _TEXT,
    "listens": _SWITCH,
    "preempted": _one_of(get_args(Preempted)),
    "asks": _TEXT,
    "seen": _or_none(_SEEN),
    "seq": _COUNT,
    "courier": _PORT,
    "probe": _SHORT,
}
PLAN: Final[Mapping[str, Kind]] = {
    "job": _SHORT,
    "round": _ROUND,
    "phase": _one_of(get_args(Phase)),
    "reason": _TEXT,
    "cause": _one_of(get_args(Cause)),
    "nodes": Kind("an object of columns", lambda value: type(value) is dict),
    "spares": _NAMES,
    "joining": _NAMES,
    "master_addr": _SHORT,
    "master_port": _PORT,
    "checkpoint": _or_none(_CHECKPOINT),
    "restarts": _COUNT,
    "without_progress": _COUNT,
    "crashes": _COUNT,
    "failure": _or_none(_FAILURE),
    "waits": _TEXT,
    "notice": _TEXT,
    "facts": Kind("an object of short texts", _is_facts),
    "strict": _SWITCH,
    "asked": _TEXT,
    "exit_code": _CODE,
    "strangers": _NAMES,
    "coordinator": _SHORT,
}

NODES_ALL: Final = _object(
    {"all": _SHORT, "number": _integer(1, 100_000)}, required=("all", "number")
)
"""A column in which each of ``number`` nodes has the same value."""
