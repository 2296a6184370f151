"""elaunch.text: what others wrote, secrets, and numbers in words."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import pytest

from elaunch.agent.failure.tracebacks import printable
from elaunch.agent.logs.console import OneLine
from elaunch.text import (
    arguments,
    block,
    count,
    date,
    duration,
    is_secret,
    listed,
    moment,
    on_ranks,
    one_line,
    ranks,
    shortened,
    size,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain ä 漢字 …", "plain ä 漢字 …"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("a\nb\r\tc\x00", r"a\nb\r\tc\x00"),
        ("\u202egnp.exe\u2066", r"\u202egnp.exe\u2066"),
        ("a\u2028b\x85c", r"a\u2028b\x85c"),
        ("\ud800", r"\ud800"),
        ("a\u3000b\xa0c", "a\u3000b\xa0c"),
    ],
)
def test_a_line(text: str, expected: str) -> None:
    """What does not print is written out; what does, in any script, is as it was."""
    assert one_line(text) == expected
    assert one_line(expected) == expected


def test_a_block() -> None:
    """Its lines and tabs stay."""
    assert block("a\tb\n\x1b[1mc\x9d\n") == "a\tb\n\\x1b[1mc\\x9d\n"


def test_reports_are_printed_so() -> None:
    """Colours and progress bars go, what else moves a terminal is written out."""
    assert printable("\x1b[31mred\x1b[0m \x9b2J\u202e\n 1%\r 2%") == "red \\x9b2J\\u202e\n 2%"


def test_log_lines_are_one_line() -> None:
    """A reason from the store, the name of a file: neither begins a line of its own."""
    reason = "ended\nelaunch 07:00:00.000 all is well\x1b[1A\x9b"
    record = logging.makeLogRecord({"msg": "round %d: %s", "args": (3, reason), "levelno": 30})
    line = OneLine("elaunch %(message)s").format(record)
    assert line == "elaunch round 3: ended\\nelaunch 07:00:00.000 all is well\\x1b[1A\\x9b"
    assert record.args == (3, reason)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--api-key abc --lr 3", "--api-key (hidden) --lr 3"),
        ("--api-key=abc x", "--api-key=(hidden) x"),
        ("--wandb_token abc", "--wandb_token (hidden)"),
        ("--hftoken abc", "--hftoken (hidden)"),
        ("--password -abc", "--password (hidden)"),
        ("+wandb.api_key=abc lr=3", "+wandb.api_key=(hidden) lr=3"),
        ("env HF_TOKEN=abc run", "env HF_TOKEN=(hidden) run"),
        ("-k abc --key", "-k abc --key"),
        ("--key --lr 3", "--key --lr 3"),
        ("--secret a=b", "--secret (hidden)"),
        ("--tokenizer gpt2 --max-tokens 9", "--tokenizer gpt2 --max-tokens 9"),
        ("--monkey banana --key-dim=64", "--monkey banana --key-dim=64"),
        ("--rdzv-secret-file f --ssh_key_path p", "--rdzv-secret-file f --ssh_key_path p"),
        ("", ""),
    ],
)
def test_arguments(words: str, expected: str) -> None:
    """Values after names that look secret; others stay as they are."""
    assert arguments(words.split()) == expected.split()


@pytest.mark.parametrize(
    "name",
    [
        *("WANDB_API_KEY", "HF_TOKEN", "GITHUB_TOKEN_2", "MY_TOKEN_PROD", "AWS_ACCESS_KEY_ID"),
        *("AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "ssh-private-key", "pw", "db_pass", "AUTH"),
        *("DEPLOY_PRIVATE", "user_cred"),
    ],
)
def test_names_that_look_like_a_secrets(name: str) -> None:
    """Of an option, a variable, or a key."""
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["TOKENIZERS_PARALLELISM", "RDZV_SECRET_FILE", "monkey", "key_dim", "AUTHOR", "PATH", "", "-"],
)
def test_names_that_do_not(name: str) -> None:
    """What has such a letter sequence only, and what says where a secret is."""
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((3,), "rank 3"),
        ((7, 5), "ranks 5, 7"),
        ((0, 1), "ranks 0, 1"),
        ((0, 1, 2, 4), "ranks 0-2, 4"),
        ((0, 2, 3), "ranks 0, 2, 3"),
        (range(1000), "ranks 0-999"),
        (range(0, 40, 2), f"ranks {', '.join(map(str, range(0, 32, 2)))} and 4 more"),
    ],
)
def test_ranks(numbers: Sequence[int], text: str) -> None:
    """Three or more in a row are a span, and not more than 16 are named."""
    assert ranks(numbers) == text


def test_counts_and_lists() -> None:
    assert (count(1), count(0, "worker"), count(3)) == ("1 node", "0 workers", "3 nodes")
    assert listed(["a", "b"]) == "a, b"
    assert listed(list("abcd"), 2) == "a, b and 2 more"


def test_what_is_too_long_says_so() -> None:
    assert shortened("four", 4) == "four"
    assert shortened("longer", 4) == "lon…"


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
    ("number", "text"),
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
def test_size(number: int, text: str) -> None:
    assert size(number) == text


def test_moment_names_the_day_only_where_it_is_another() -> None:
    now = time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1))
    assert moment(now - 60, now) == "11:59:00"
    assert moment(now - 86_400, now) == "Nov 20 12:00"
    assert moment(now - 400 * 86_400, now) == "2025-10-17"
    assert date(now) == "2026-11-21 12:00:00"


def test_what_each_rank_has() -> None:
    """Equal values are named once, in the order of their first ranks."""
    assert on_ranks(enumerate([120, 120, 121, 120, 120])) == [
        "120 on ranks 0, 1, 3, 4",
        "121 on rank 2",
    ]
    assert on_ranks([]) == []
