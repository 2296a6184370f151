"""elaunch.training.metrics.files: which rows a later round makes void."""

from __future__ import annotations

import pytest

from elaunch.training.metrics.files import (
    FROM_NOTHING,
    Beginning,
    firsts,
    parsed,
    row_key,
    written,
)
from elaunch.training.metrics.rows import Encoder


@pytest.mark.parametrize(
    ("begun", "void", "kept"),
    [
        # What the launcher says holds for all groups.
        (Beginning(10), [("training", 11), ("other", 11)], [("training", 10), ("other", 10)]),
        (Beginning(FROM_NOTHING), [("training", 0), ("other", 0)], []),
        (Beginning(None), [], [("training", 0), ("training", 10**9)]),
        # Without it the first report tells it.
        (
            Beginning(None, {"training": 11}),
            [("training", 11), ("validation", 11), ("other", 11)],
            [("training", 10), ("validation", 10), ("other", 10)],
        ),
        (
            Beginning(None, {"validation": 10}),
            [("validation", 10), ("training", 11), ("other", 11)],
            [("validation", 9), ("training", 10), ("other", 10)],
        ),
        (
            Beginning(None, {"settings": 0}),
            [("settings", 0), ("settings", 5)],
            [("training", 0), ("training", 50)],
        ),
        # A script that does not resume from what it was given begins where it says.
        (
            Beginning(100, {"training": 1}),
            [("training", 1), ("validation", 50), ("other", 1)],
            [("training", 0)],
        ),
        (
            Beginning(100, {"validation": 100, "training": 101}),
            [("validation", 100), ("training", 101)],
            [("training", 100), ("other", 100)],
        ),
    ],
)
def test_what_a_round_makes_void(
    begun: Beginning, void: list[tuple[str, int]], kept: list[tuple[str, int]]
) -> None:
    def is_void(group: str, step: int) -> bool:
        limit = begun.void_from(group)
        return limit is not None and step >= limit

    assert [row for row in [*void, *kept] if is_void(*row)] == void


def test_ranks_tell_apart_from_each_other() -> None:
    one, two = Beginning(None, {"training": 12}), Beginning(None, {"training": 11, "x": 3})
    assert one.joined(two) == two.joined(one) == Beginning(None, {"training": 11, "x": 3})
    assert Beginning(5).joined(Beginning(None)).joined(Beginning(7)) == Beginning(5)


def test_firsts() -> None:
    rows = [("a", 3), ("b", 0), ("a", 1), ("a", 2)]
    assert firsts(rows) == {"a": 1, "b": 0}


def test_what_is_written_can_be_read() -> None:
    known = {0: Beginning(None, {"a": 1}), 12: Beginning(FROM_NOTHING)}
    assert parsed(written(known)) == known


@pytest.mark.parametrize("raw", [b"", b"[1]", b'{"x": {}}', b'{"1": 2}', b'{"1": {"first": 1}}'])
def test_what_cannot_be_read_tells_nothing(raw: bytes) -> None:
    assert parsed(raw) == {}


@pytest.mark.parametrize("group", ["training", 'a"b\\', "größe"])
def test_the_place_of_a_row(group: str) -> None:
    line = Encoder(rank=1, round=4).row(group, 17, {"x": 1}, 1.0).line.encode()
    place = row_key(line)
    assert place is not None
    assert (place.group, place.step, place.round) == (group, 17, 4)


TORN = b'{"group":"%s","steps_completed":%s,"round":0,"rank":0,"time":1}'


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b'{"group":"a","steps_com',
        b"{}\n",
        TORN % (b"\x01", b"1"),
        TORN % (b"a", b"9" * 5000),
    ],
)
def test_what_is_no_row_has_no_place(line: bytes) -> None:
    assert row_key(line) is None
