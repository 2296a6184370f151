"""How a run is named is the same for all views: its id, the beginning, a directory, the newest."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaunch.cli import execute
from elaunch.runs.directory import RunDir, create
from elaunch.runs.record import first_record

VIEWS = (
    ["why"],
    ["logs"],
    ["top", "--json"],
    ["stacks"],
    ["metrics"],
    ["profile", "--rank", "0"],
    ["debug", "--rank", "0"],
)
NAMED = (*VIEWS, ["status"], ["dashboard"], ["stop"], ["preempt"], ["restart"])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the environment, in which the runs of a directory of the test's own are seen."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return {"XDG_STATE_HOME": str(tmp_path)}


def ended(home: dict[str, str], run_id: str) -> RunDir:
    """Return a run that has ended."""
    made = create(run_id, home)
    record = first_record(run_id, run_id, made.path)
    record |= {"state": "STOPPED", "ended_at": record["started_at"], "exit_code": 143}  # type: ignore[typeddict-item]
    record["agent"]["start_ticks"] = 1
    made.write_state(record)
    return made


@pytest.mark.parametrize("words", VIEWS, ids=" ".join)
def test_without_run_it_is_the_newest(
    home: dict[str, str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By all that look at one; where there is none, all say the same."""
    assert execute(words) == 2
    message = capsys.readouterr().err
    assert f"no run is recorded in {home['XDG_STATE_HOME']}/elaunch/runs" in message
    assert message.endswith("; name a run directory (elaunch explain E-NO-RUN)\n")
    ended(home, "older")
    ended(home, "newest")
    execute(words)
    shown = "".join(capsys.readouterr())
    assert "newest" in shown and "older" not in shown


@pytest.mark.parametrize("words", NAMED, ids=" ".join)
def test_a_name_that_fits_none_or_several(
    home: dict[str, str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One message by all."""
    ended(home, "train-1")
    ended(home, "train-2")
    for name, message in (
        ("trian-1", "there is no run 'trian-1'; the nearest: train-1"),
        ("train", "RUN 'train' fits 2 runs: train-2, train-1; give more of it"),
        ("", "there is no run ''; the newest: train-2, train-1"),
    ):
        assert execute([words[0], name, *words[1:]]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", VIEWS, ids=" ".join)
def test_a_directory_is_a_name(
    home: dict[str, str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where its record is of another directory: it was copied."""
    made = ended(home, "one")
    ended(home, "two")
    execute([words[0], str(made.path), *words[1:]])
    shown = "".join(capsys.readouterr())
    assert "one" in shown and "two" not in shown
