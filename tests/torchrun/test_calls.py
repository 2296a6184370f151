"""How a call gets to its workers, and which run's record is that of an agent."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import elaunch
from elaunch import proc
from elaunch.errors import ElaunchError, UsageError
from elaunch.runs.directory import create
from elaunch.torchrun import LaunchConfig, agentprocess, calls, elastic_launch
from elaunch.torchrun.calls import call_of, pickled
from tests.views.played_agent import new_record


def test_a_pipe_of_both_directions_takes_a_fork() -> None:
    """It is a socket, which no other process can open again; a pipe of one direction is none."""
    one_way, both = multiprocessing.Pipe(duplex=False), multiprocessing.Pipe()
    assert call_of(os.write, one_way, None)
    assert call_of(os.write, both, None) is None
    with pytest.raises(pickle.PicklingError, match=r"Pipe\(duplex=False\) and queues"):
        pickled(os.write, both)
    for end in (*one_way, *both):
        end.close()


class _Refuses:
    """What raises when it is pickled, as a tensor with a history does, or a pointer of ctypes."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __reduce__(self) -> str:
        raise self.error("this one stays")


@pytest.mark.parametrize("error", [RuntimeError, ValueError, NotImplementedError])
def test_what_refuses_to_be_pickled_takes_a_fork(error: type[Exception]) -> None:
    """By default; whatever it raises."""
    assert call_of(os.write, (_Refuses(error),), None) is None


def test_a_call_is_pickled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be large, or open something again for the other process each time."""
    made, asked = Mock(), Mock(return_value=(print, ()))
    argument = type("Counted", (), {"__reduce__": lambda _: asked()})()
    monkeypatch.setattr(calls, "run_agent", made)
    made.return_value = agentprocess.Ended(-9, (), None, "")
    with pytest.raises(ElaunchError, match="the agent"):
        elaunch.run(os.getpid, argument)
    assert made.call_count == asked.call_count == 1


def test_what_is_no_function_is_named() -> None:
    """Before anything starts."""
    with pytest.raises(TypeError, match=r"takes a function, not the str 'train.py'"):
        elaunch.run("train.py")  # type: ignore[arg-type]


def test_an_unknown_start_method_is_named() -> None:
    """Before anything starts; it was taken for forkserver."""
    with pytest.raises(UsageError, match="start_method: 'frok' is not known; did you mean 'fork'"):
        elaunch.run(os.getpid, start_method="frok")  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_cell_s_function_takes_a_fork(monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    """Another process has no file to find it in; the workers all failed with an AttributeError."""
    main = sys.modules["__main__"]
    monkeypatch.delattr(main, "__file__", raising=False)
    monkeypatch.setattr(main, "cell", _cell, raising=False)
    monkeypatch.setattr(_cell, "__module__", "__main__")
    assert call_of(_cell, (), None) is None
    said = f"start_method: '{method}' cannot be had for _cell\\(\\): .* start_method='fork'"
    with pytest.raises(UsageError, match=said):
        elaunch.run(_cell, start_method=method)
    config = LaunchConfig(1, 1, 1, start_method=method)
    with pytest.raises(UsageError, match=said):
        elastic_launch(config, _cell)()


def test_a_cell_s_function_in_a_partial_and_a_cell_s_class_take_a_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They can be pickled, but no other process finds them; the workers failed."""
    main = sys.modules["__main__"]
    monkeypatch.delattr(main, "__file__", raising=False)
    for cell in (_cell, _Cell):
        monkeypatch.setattr(main, cell.__name__, cell, raising=False)
        monkeypatch.setattr(cell, "__module__", "__main__")
    assert call_of(partial(_cell), (), None) is None
    assert call_of(os.write, (1, [_Cell()]), None) is None
    assert call_of(os.write, (1, b"of __main__"), None)
    with pytest.raises(UsageError, match="'spawn' cannot be had for partial"):
        elaunch.run(partial(_cell), start_method="spawn")


def _cell() -> None:
    """A function that a notebook defines."""


class _Cell:
    """A class that a notebook defines."""


def test_an_earlier_run_with_the_same_pid_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that starts again gives the same small pids, and may keep host name and home."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    agent = proc.read_process(os.getpid())
    assert agent is not None
    for name, changes in (("earlier", {"start_ticks": agent.start - 1}), ("boot", {"boot_id": ""})):
        run = create(name, os.environ)
        record = new_record(run, name, [])
        record["agent"] |= changes
        run.write_state(record)
    assert agentprocess._record(agent) is None
    run = create("own", os.environ)
    run.write_state(new_record(run, "own", []))
    found = agentprocess._record(agent)
    assert found is not None and found["run_id"] == "own"
