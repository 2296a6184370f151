"""Dumps of faulthandler and py-spy: what is read from them, and who is put together."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import elaunch
from elaunch.agent.hangs.stackdump import (
    MOST_FRAMES,
    Dump,
    group,
    is_whole,
    joined,
    parse,
    parse_spied,
)

WHOLE = """\
Thread 0x00007f3a5d7fa6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/home/me/data.py", line 7 in load
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1045 in _bootstrap_inner
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f3a5d7fa6c1 (most recent call first):
  File "/venv/elaunch/training/agentlink.py", line 90 in _read
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1045 in _bootstrap_inner
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f3a7a0c1740 (most recent call first):
  File "train.py", line 12 in step
  File "train.py", line 40 in <module>
  File "/venv/elaunch/server/__main__.py", line 27 in <module>
"""

SPIED = """\
Process 4711: python -u train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 4711 (idle): "MainThread"
    step (/home/me/train.py:12)
    <module> (/home/me/train.py:40)
Thread 4712 (active): "Thread-1 (load)"
    load (/home/me/data.py:7)
    run (threading.py:982)
"""


def test_the_scripts_stacks_are_kept() -> None:
    """Of the main thread without the server's frames; of other threads without elaunch's own."""
    found = parse(WHOLE)
    assert found == Dump(
        main=('File "train.py", line 12 in step', 'File "train.py", line 40 in <module>'),
        threads=(
            (
                'File "/usr/lib/python3.11/threading.py", line 324 in wait',
                'File "/home/me/data.py", line 7 in load',
            ),
        ),
    )


def test_no_thread_of_elaunch_is_shown() -> None:
    """Whichever folder of the package its code is in, of those that a worker has."""
    package = Path(elaunch.__file__).parent
    starts = [path for path in package.rglob("*.py") if "threading.Thread(" in path.read_text()]
    places = {path.relative_to(package).parts[0] for path in starts}
    assert {"atonce.py", "training", "wire", "store"} <= places
    for place in places - {"agent", "cli", "dashboard", "extras", "top", "torchrun", "views"}:
        file = place if place.endswith(".py") else f"{place}/some.py"
        thread = f"""Thread 0x00007f0000000001 (most recent call first):
  File "/venv/lib/python3.11/selectors.py", line 415 in select
  File "/venv/lib/python3.11/site-packages/elaunch/{file}", line 193 in _run
  File "/usr/lib/python3.11/threading.py", line 982 in run

"""
        assert parse(thread + WHOLE) == parse(WHOLE), place


def test_a_dump_is_whole_when_the_main_thread_has_been_written() -> None:
    """Not after any other thread, and not within a line."""
    assert is_whole(WHOLE)
    for end in range(len(WHOLE) - 1):
        before_the_last_line = "<module>\n" not in WHOLE[:end]
        assert not (is_whole(WHOLE[:end]) and before_the_last_line), WHOLE[:end]


@pytest.mark.parametrize("text", ["", "\n", "garbage\n", '  File "x", line 1 in f\n'])
def test_what_is_no_dump(text: str) -> None:
    """Nothing is made up."""
    assert parse(text) is None
    assert parse_spied(text) is None


def test_every_beginning_of_a_dump_can_be_read() -> None:
    """A process may end while it writes."""
    for end in range(len(WHOLE)):
        parse(WHOLE[:end])


def test_what_py_spy_writes_has_the_same_form() -> None:
    """Its main thread is named."""
    found = parse_spied(SPIED)
    assert found is not None
    assert found.main == (
        'File "/home/me/train.py", line 12 in step',
        'File "/home/me/train.py", line 40 in <module>',
    )
    assert found.threads == (
        ('File "/home/me/data.py", line 7 in load', 'File "threading.py", line 982 in run'),
    )


def test_a_deep_recursion_is_cut_in_the_middle() -> None:
    """faulthandler itself stops at 100 frames; py-spy does not."""
    frames = "".join(f"    f (x.py:{n})\n" for n in range(5000))
    found = parse_spied(f'Thread 1 (idle): "MainThread"\n{frames}')
    assert found is not None
    assert len(found.main) == MOST_FRAMES + 1
    assert "4900 frames left out" in found.main[MOST_FRAMES // 2]


def test_ranks_at_one_place_are_one_group_the_odd_ones_first() -> None:
    """Other threads do not tell ranks apart; they are shown with whose they are."""
    wait, step, load = ("barrier", "main"), ("step", "main"), ("load",)
    dumps = {0: Dump(wait, (load,)), 1: Dump(wait), 2: Dump(step), 4: Dump(wait, (load,))}
    found = group(dumps)
    assert [(one.ranks, one.main) for one in found] == [((2,), step), ((0, 1, 4), wait)]
    assert found[1].threads == (((0, 4), load),)


def test_of_groups_of_one_size_the_one_in_no_collective_comes_first() -> None:
    """The others wait for it."""
    file = "/x/site-packages/torch/distributed/distributed_c10d.py"
    wait = (f'File "{file}", line 1 in all_reduce', 'File "t.py", line 3 in <module>')
    load = ('File "d.py", line 9 in read', 'File "t.py", line 2 in <module>')
    found = group({0: Dump(wait), 1: Dump(load), 2: Dump(wait), 3: Dump(load)})
    assert [one.ranks for one in found] == [(1, 3), (0, 2)]


def test_a_dump_of_this_interpreter_is_read(tmp_path: Path) -> None:
    """Whatever its version writes."""
    script = tmp_path / "s.py"
    script.write_text(
        textwrap.dedent("""
        import faulthandler, sys, threading
        def waits():
            there.set()
            done.wait()
        def outer():
            inner()
        def inner():
            faulthandler.dump_traceback(sys.stdout, all_threads=True)
        there, done = threading.Event(), threading.Event()
        thread = threading.Thread(target=waits)
        thread.start()
        there.wait()
        outer()
        done.set()
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert is_whole(done.stdout)
    found = parse(done.stdout)
    assert found is not None
    assert [frame.rpartition(" in ")[2] for frame in found.main] == ["inner", "outer", "<module>"]
    assert str(script) in found.main[0]
    ((*_, waits),) = found.threads
    assert waits.endswith(" in waits")


def test_this_very_process(tmp_path: Path) -> None:
    """With threads of a test runner in it."""
    path = tmp_path / "dump"
    with path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    found = parse(path.read_text())
    assert found is not None
    assert threading.current_thread() is threading.main_thread()
    assert os.path.basename(__file__) in found.main[0]


def test_a_call_of_the_script_api_is_one_frame() -> None:
    """Ranks that wait in one barrier are at one place, however each of them waits."""
    api = 'File "/venv/elaunch/training/distributed.py", line 206 in barrier'
    script = 'File "train.py", line 12 in step'
    inner = [
        '  File "/usr/lib/python3.11/selectors.py", line 415 in select',
        '  File "/venv/elaunch/training/agreement.py", line 220 in _await',
        '  File "/venv/elaunch/training/ranks.py", line 126 in _take_part',
    ]
    for waits in (inner, inner[1:], inner[2:], []):
        lines = ["Current thread 0x01 (most recent call first):", *waits, f"  {api}", f"  {script}"]
        assert parse("\n".join(lines) + "\n") == Dump((api, script))
    assert parse(f"Current thread 0x01 (most recent call first):\n  {script}\n") == Dump((script,))


def test_what_the_script_api_calls_of_the_script_is_kept() -> None:
    """An object that hangs while it is pickled."""
    frames = (
        'File "train.py", line 3 in __getstate__',
        'File "/venv/elaunch/training/distributed.py", line 206 in broadcast',
        'File "train.py", line 12 in step',
    )
    text = "\n".join(f"  {frame}" for frame in frames)
    assert parse(f"Current thread 0x01 (most recent call first):\n{text}\n") == Dump(frames)


def test_frames_without_a_line_and_variables_are_read() -> None:
    """As py-spy writes them with --native and --locals."""
    text = (
        'Thread 7 (idle): "MainThread"\n    pthread_cond_wait (libc.so.6)\n'
        "    step (/home/me/train.py:12)\n        Locals:\n            rank: 1\n"
        '            text: "f (x.py:3)"\n    <module> (/home/me/train.py:40)\n'
    )
    found = parse_spied(text)
    assert found is not None
    step = 'File "/home/me/train.py", line 12 in step'
    assert (
        found.main[:2] == ('File "libc.so.6" in pthread_cond_wait', step) and len(found.main) == 3
    )
    assert found.values == ((step, ("rank: 1", 'text: "f (x.py:3)"')),)
    (one,) = joined([*group({3: found}), *group({1: Dump(found.main, (), (("f", ("x",)),))})])
    assert one.ranks == (1, 3) and one.values == (("f", ("x",)),)
