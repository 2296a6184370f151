"""What is taken from a dead worker's last lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import elaunch
from elaunch.agent.failure.tracebacks import cap, message_of, pick, place_of, printable

PLAIN = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
    ^^^^^^
ValueError: boom"""

CHAINED = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    open("x")
OSError: [Errno 28] No space left on device

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 5, in <module>
    raise RuntimeError("cannot save") from error
RuntimeError: cannot save"""

CRASH = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "train.py", line 9 in <module>"""


IGNORED = "Exception ignored in atexit callback: <function end at 0x7f>"


def lines(*parts: str) -> list[str]:
    """Join texts to lines, as the log pump's tail gives them."""
    return "\n".join(parts).split("\n")


@pytest.mark.parametrize(
    ("tail", "exitcode", "expected"),
    [
        (["a", "b"], 1, ["a", "b"]),
        ([], 1, []),
        (["", "a", "", ""], 3, ["a"]),
        (lines("noise", PLAIN), 1, lines(PLAIN)),
        (lines(PLAIN, "[W1120 18:04:12.001 init.cpp:1] warn"), 1, lines(PLAIN)),
        (lines(PLAIN, "[rank0]:[W1120 18:04:12.001 x.cpp:1] warn"), 1, lines(PLAIN)),
        (lines(PLAIN, "more of the message"), 1, lines(PLAIN, "more of the message")),
        (lines("one", PLAIN.replace("boom", "old"), "retry", PLAIN), 1, lines(PLAIN)),
        (lines("one", CHAINED), 1, lines(CHAINED)),
        (lines(PLAIN, CHAINED), 1, lines(CHAINED)),
        (lines(PLAIN, IGNORED, CHAINED), 1, lines(PLAIN)),
        (lines(CHAINED, "Error in atexit._run_exitfuncs:", PLAIN), 1, lines(CHAINED)),
        (lines(IGNORED, PLAIN), 1, lines(PLAIN)),
        (lines("killed", PLAIN, "step 9"), -9, lines("killed", PLAIN, "step 9")),
        (lines("step 1", CRASH), -11, lines(CRASH)),
        (lines("step 1", PLAIN, "terminate called"), -6, lines(PLAIN, "terminate called")),
        (lines("step 1", "step 2"), -11, lines("step 1", "step 2")),
    ],
)
def test_pick(tail: list[str], exitcode: int, expected: list[str]) -> None:
    """A block is found by how the worker ended; without one it is the last lines."""
    assert list(pick(tail, exitcode)) == expected


def test_last_lines_are_twenty() -> None:
    """No traceback: the end of the output."""
    assert list(pick([str(n) for n in range(50)], 3)) == [str(n) for n in range(30, 50)]


def test_torch_rank_prefix_is_removed_and_ends_the_block() -> None:
    """With a process group torch prefixes each line of the exception."""
    prefixed = ["[rank1]: " + line if line else "[rank1]:" for line in CHAINED.split("\n")]
    picked = pick([*prefixed, "wandb: syncing", "wandb: done"], 1)
    assert "\n".join(picked) == CHAINED


@pytest.mark.skipif("sys.version_info < (3, 11)", reason="no exception groups")
def test_last_traceback_of_a_real_exception_group() -> None:
    """The group's own header begins the block, and the group is the message."""
    code = "raise ExceptionGroup('two', [ValueError('a'), KeyError('b')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    found = pick(["noise", *done.stderr.split("\n")], 1)
    assert "\n".join(found) == done.stderr.rstrip()
    assert message_of(found) == "ExceptionGroup: two (2 sub-exceptions)"


def test_real_exception_with_a_long_message(tmp_path: Path) -> None:
    """A message of several lines stays whole, and its first line is the message."""
    script = tmp_path / "s.py"
    script.write_text(
        "try:\n    1/0\nexcept ZeroDivisionError:\n    raise ValueError('a\\n\\n  b\\nc')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    block = pick(done.stderr.split("\n"), 1)
    assert "\n".join(block) == done.stderr.rstrip()
    assert message_of(block) == "ValueError: a"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (PLAIN, "ValueError: boom"),
        (CHAINED, "RuntimeError: cannot save"),
        (CRASH, "Fatal Python error: Segmentation fault"),
        ("just a line", ""),
        ("", ""),
        (
            "terminate called without an active exception",
            "terminate called without an active exception",
        ),
        (
            "terminate called after throwing an instance of 'c10::DistBackendError'\n"
            "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread "
            "terminated with exception: CUDA error: an illegal memory access was encountered\n"
            "frame #0: c10::Error::Error",
            "Process group watchdog thread terminated with exception: CUDA error: an illegal "
            "memory access was encountered",
        ),
        (
            "Traceback (most recent call last):\n"
            '  File "a.py", line 1, in f\n'
            "    g()\n"
            "ValueError: Caught ValueError in DataLoader worker process 0.\n"
            "Original Traceback (most recent call last):\n"
            '  File "w.py", line 2, in g\n'
            "    raise ValueError(1)\n"
            "ValueError: 1",
            "ValueError: 1",
        ),
        (
            'Traceback (most recent call last):\n  File "a.py", line 1\nKeyboardInterrupt',
            "KeyboardInterrupt",
        ),
    ],
)
def test_message_of(block: str, message: str) -> None:
    """The line with the exception's name; of the innermost, where one is quoted."""
    assert message_of(block.split("\n")) == message


SITE = "/v/lib/python3.11/site-packages/torch/nn/modules/module.py"
OWN = os.path.dirname(elaunch.__file__)


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        (['  File "/home/me/train.py", line 3, in <module>'], "train.py:3"),
        (
            [
                '  File "/home/me/train.py", line 3, in <module>',
                '  File "/home/me/net/block.py", line 31, in forward',
                f'  File "{SITE}", line 1773, in _wrapped_call_impl',
            ],
            "block.py:31 in forward",
        ),
        (
            [
                '  File "/home/me/train.py", line 3, in load',
                "KeyError: 1",
                "",
                "During handling of the above exception, another exception occurred:",
                "",
                "Traceback (most recent call last):",
                '  File "/home/me/train.py", line 9, in retry',
            ],
            "train.py:9 in retry",
        ),
        (['  File "/home/me/cfg.py", line 7', "    a = = 1"], "cfg.py:7"),
        (['  | File "/home/me/group.py", line 2, in run'], "group.py:2 in run"),
        ([f'  File "{SITE}", line 3, in f'], ""),
        (['  File "<string>", line 1, in <module>'], ""),
        (['  File "/usr/lib/python3.11/runpy.py", line 3, in _run_code'], ""),
        (
            ['  File "t.py", line 5, in save', f'  File "{OWN}/training/x.py", line 9, in f'],
            "t.py:5 in save",
        ),
        ([f'  File "{OWN}/examples/train.py", line 9, in step'], "train.py:9 in step"),
        ([], ""),
    ],
    ids=[
        *("module", "library", "chained", "syntax", "group", "installed", "string", "std"),
        *("elaunch", "example", "none"),
    ],
)
def test_place_of(frames: list[str], place: str) -> None:
    """The innermost frame of the user's own files, of the last exception."""
    block = ["Traceback (most recent call last):", *frames, "ValueError: b"]
    assert place_of(block) == place


def test_a_real_traceback_names_the_place_in_the_script(tmp_path: Path) -> None:
    """Where the script called the library in which the error was raised."""
    script = tmp_path / "s.py"
    script.write_text("import json\ndef read():\n    return json.loads('{')\nread()\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert place_of(pick(done.stderr.splitlines(), 1)) == "s.py:3 in read"


def test_cap_says_what_it_leaves_out() -> None:
    """Beginning and end stay, the note names the file."""
    capped = cap([f"line {n}" for n in range(500)], "/logs/stderr.log")
    assert len(capped) == 200
    assert capped[0] == "line 0" and capped[-1] == "line 499"
    assert "… 301 lines left out, see /logs/stderr.log" in capped
    assert cap(["x" * 2001], "f") == ("x" * 2000 + " … the rest is left out, see f",)
    assert cap(["a"] * 200, "f") == ("a",) * 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        (" 1%\r 2%\r 3%", " 3%"),
        (" 1%\r 2%\r", " 2%"),
        ("a\tb\nc", "a\tb\nc"),
        ("bell\x07\x00", "bell"),
        ("\udcff", "?"),
        ("ä…", "ä…"),
    ],
)
def test_printable(text: str, expected: str) -> None:
    """What would disturb a terminal or cannot be encoded is gone."""
    assert printable(text) == expected


@given(
    st.lists(
        st.sampled_from([*CHAINED.split("\n"), "[rank1]: Traceback", "x", "", *CRASH.split("\n")])
    ),
    st.sampled_from([1, 3, -6, -9, -11]),
)
def test_pick_takes_any_lines(tail: list[str], exitcode: int) -> None:
    """Whatever the order of lines, something printable comes out and nothing fails."""
    picked = pick(tail, exitcode)
    message_of(picked)
    assert set(picked) <= {printable(line).removeprefix("[rank1]: ") for line in tail}
