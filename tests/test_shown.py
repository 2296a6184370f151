"""elaunch.shown: what others wrote, and arguments with secrets."""

from __future__ import annotations

import logging

import pytest

from elaunch import shown
from elaunch.agent.failure.tracebacks import printable
from elaunch.agent.main import _OneLine


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
    assert shown.line(text) == expected
    assert shown.line(expected) == expected


def test_a_block() -> None:
    """Its lines and tabs stay."""
    assert shown.block("a\tb\n\x1b[1mc\x9d\n") == "a\tb\n\\x1b[1mc\\x9d\n"


def test_reports_are_printed_so() -> None:
    """Colours and progress bars go, what else moves a terminal is written out."""
    assert printable("\x1b[31mred\x1b[0m \x9b2J\u202e\n 1%\r 2%") == "red \\x9b2J\\u202e\n 2%"


def test_log_lines_are_one_line() -> None:
    """A reason from the store, the name of a file: neither begins a line of its own."""
    reason = "ended\nelaunch 07:00:00.000 all is well\x1b[1A\x9b"
    record = logging.makeLogRecord({"msg": "round %d: %s", "args": (3, reason), "levelno": 30})
    line = _OneLine("elaunch %(message)s").format(record)
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
    assert shown.arguments(words.split()) == expected.split()
