"""elaunch.text: how amounts are written."""

from __future__ import annotations

import time

import pytest

from elaunch.text import clean, date, duration, memory, moment


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (0.052, "0.05 s"),
        (1.25, "1.2 s"),
        (9.99, "10.0 s"),
        (10, "10 s"),
        (59.4, "59 s"),
        (59.6, "1m 00s"),
        (192, "3m 12s"),
        (3599.9, "1h 00m"),
        (7500, "2h 05m"),
        (86_400, "1d 00h"),
        (273_600, "3d 04h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (8_600_000, "8.20 MiB"),
        (12 << 20, "12.0 MiB"),
        (612 << 20, "612 MiB"),
        (1 << 30, "1.00 GiB"),
        (1023 << 20, "1.00 GiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_memory(count: int, text: str) -> None:
    assert memory(count) == text


def test_moment_names_the_day_only_where_it_is_another() -> None:
    now = time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1))
    assert moment(now - 60, now) == "11:59:00"
    assert moment(now - 86_400, now) == "Nov 20 12:00"
    assert moment(now - 400 * 86_400, now) == "2025-10-17"
    assert date(now) == "2026-11-21 12:00:00"


def test_clean_leaves_nothing_that_moves_the_cursor() -> None:
    assert clean("ü \x1b[31mred\r\n\udcff") == "ü \\x1b[31mred\\r\\n\\udcff"
