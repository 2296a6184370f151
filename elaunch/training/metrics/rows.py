"""Rows: what is reported, checked and encoded at the call, so that an error is the caller's own.

A row is one line of JSON. ``NaN``, ``Infinity`` and ``-Infinity`` stand in it as Python, pandas and
JavaScript's libraries write them; JSON itself has no word for them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from elaunch.errors import MetricError
from elaunch.training.metrics.files import VALIDATION

log = logging.getLogger("elaunch")

COLUMNS: Final = ("group", "steps_completed", "round", "rank", "time")
LARGEST_STEP: Final = 2**63 - 1
SMALLEST_INT: Final = -(2**63)
LARGEST_INT: Final = 2**64 - 1
DEEPEST: Final = 20
STEPS: Final = 256
"""Steps that are remembered: a checkpoint is of one of the newest."""

_PLAIN: Final = frozenset({float, int, str, bool, type(None)})
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode


class Row(NamedTuple):
    """One report, ready to be written; ``values`` are its metrics as plain Python."""

    group: str
    steps_completed: int
    time: float
    line: str
    values: Mapping[str, Any]


class Encoder:
    """Makes the rows of one rank in one round."""

    def __init__(self, rank: int, round: int) -> None:
        self._own = {"round": round, "rank": rank}
        self._place = f',"round":{round},"rank":{rank},"time":'
        self._starts: dict[str, str] = {}
        self._renamed_once: set[str] = set()

    def row(self, group: str, steps_completed: int, metrics: Mapping[str, Any], time: float) -> Row:
        """Return the row; raise MetricError that names what cannot be written, and why."""
        start = self._starts.get(group) if type(group) is str else None
        if start is None:
            group = checked_group(group)
            start = self._starts[group] = f'{{"group":{_encode(group)},"steps_completed":'
        step = steps_completed
        if type(step) is not int or not 0 <= step <= LARGEST_STEP:
            step = _checked_step(step)
        values = self._plain(group, step, metrics)
        rest = _encode(values)[1:] if values else "}"
        comma = "," if values else ""
        line = f"{start}{step}{self._place}{time:.6f}{comma}{rest}\n"
        return Row(group, step, time, line, values)

    def _plain(self, group: str, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics as plain Python, without what the row says anyway."""
        if not isinstance(metrics, Mapping):
            raise MetricError(
                f"metrics is {_article(metrics)}, not a mapping: give names with their values, as "
                "in metrics={'loss': 0.5}"
            )
        values = {}
        for name, value in metrics.items():
            if not isinstance(name, str):
                raise MetricError(
                    f"a metric's name is {name!r}, {_article(name)}: names are text; "
                    f"use {str(name)!r}"
                )
            if type(value) not in _PLAIN or type(value) is int:
                value = _plain_value(name, value, 0)
            if name not in COLUMNS:
                values[name] = value
            elif not _is_same(value, {**self._own, "group": group, COLUMNS[1]: step}.get(name)):
                values[self._renamed(name, metrics)] = value
        return values

    def _renamed(self, name: str, metrics: Mapping[str, Any]) -> str:
        """Return what a metric is called that has the name of a column and another value."""
        other = f"metric_{name}"
        while other in metrics:
            other = f"metric_{other}"
        if name not in self._renamed_once:
            self._renamed_once.add(name)
            # Rank 0 logs it for all: they report under the same names.
            level = logging.WARNING if self._own["rank"] == 0 else logging.INFO
            log.log(level, "metric %r is kept as %r: each row has a column %r", name, other, name)
        return other


def _is_same(value: Any, column: object) -> bool:
    """Tell whether a metric says what the column of its name says; 1.0 is rank 1."""
    return type(value) in (int, float, str) and value == column


def checked_group(group: object) -> str:
    """Return the name of a group; raise MetricError unless it is text, printable, without a dot."""
    if not isinstance(group, str):
        raise MetricError(f"the group is {group!r}, {_article(group)}: its name has to be text")
    group = str.__str__(group)
    if not group or group.isspace():
        raise MetricError("the group has an empty name: give one, such as 'training'")
    if not group.isprintable():
        raise MetricError(f"the group {group!r} has a character that cannot be printed")
    if "." in group:
        raise MetricError(
            f"the group {group!r} has a dot: name it {group.replace('.', '_')!r}, say"
        )
    return group


def _checked_step(step: object) -> int:
    plain = step
    if type(step) not in _PLAIN:
        plain = _plain_value("steps_completed", step, 0)
    if type(plain) is float and plain.is_integer():
        plain = int(plain)
    if type(plain) is not int:
        raise MetricError(
            f"steps_completed is {step!r}, {_article(step)}: give the number of steps, an int"
        )
    if not 0 <= plain <= LARGEST_STEP:
        raise MetricError(f"steps_completed is {plain}: it goes from 0 to 2**63 - 1")
    return plain


def _plain_value(name: str, value: Any, depth: int) -> Any:
    """Return what JSON and pandas can hold for ``value``; raise MetricError that names it."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not SMALLEST_INT <= value <= LARGEST_INT:
            raise MetricError(
                f"metric {name!r} is an int of {value.bit_length()} bits, and readers take 64: "
                "give a float or text"
            )
        return int(value)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if depth > DEEPEST:
        raise MetricError(f"metric {name!r} is nested more than {DEEPEST} deep: give it flat")
    if isinstance(value, Mapping):
        return {_key(name, key): _plain_value(name, v, depth + 1) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(name, item, depth + 1) for item in value]
    return _taken_out(name, value, depth)


def _key(name: str, key: object) -> str:
    if not isinstance(key, str):
        raise MetricError(f"metric {name!r} has a key {key!r}, {_article(key)}: keys are text")
    return str.__str__(key)


def _taken_out(name: str, value: Any, depth: int) -> Any:
    """Return the number in a numpy scalar, a 0-d array or a 0-d tensor."""
    shape = getattr(value, "shape", None)
    if not callable(getattr(value, "item", None)) or shape is None:
        raise MetricError(
            f"metric {name!r} is {_article(value)}, which cannot be written: give a number, text, "
            "or a list or dict of them"
        )
    if len(shape):
        raise MetricError(
            f"metric {name!r} is {_article(value)} of shape {tuple(shape)}, not one number: give "
            ".mean().item(), say, or .tolist() for all of them"
        )
    try:
        number = value.item()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        raise MetricError(
            f"metric {name!r} is {_article(value)} whose value cannot be had: {error}"
        ) from error
    if number is value or hasattr(number, "item"):
        raise MetricError(f"metric {name!r} is {_article(value)}, whose .item() is no number")
    if type(number) not in _PLAIN:
        raise MetricError(
            f"metric {name!r} is {_article(value)} that holds {_article(number)}: give a number, "
            "or text"
        )
    return _plain_value(name, number, depth + 1)


def _article(value: object) -> str:
    kind = type(value)
    word = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return f"{'an' if word[0] in 'aeiouAEIOU' else 'a'} {word}"


class Latest:
    """The newest metrics that this rank reported: those of a checkpoint.

    By step and group; of each name the last.
    """

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, dict[str, float]]] = {}

    def take(self, row: Row) -> None:
        """Remember a row's numbers."""
        groups = self._steps.pop(row.steps_completed, {})
        self._steps[row.steps_completed] = groups  # the newest stand last
        numbers = groups.setdefault(row.group, {})
        for name, value in row.values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers[name] = value
        if len(self._steps) > STEPS:
            del self._steps[next(iter(self._steps))]

    def at(self, step: int) -> dict[str, float]:
        """Return the numbers of a step: by their names, and as ``group.name``."""
        groups = self._steps.get(step, {})
        plain: dict[str, float] = {}
        for group in sorted(groups, key=lambda group: group == VALIDATION):
            plain |= groups[group]
        named = {f"{group}.{name}": v for group, own in groups.items() for name, v in own.items()}
        return {**plain, **named}
