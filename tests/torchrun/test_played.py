"""One program with torch's launcher, and with elaunch's in its place: the same is seen.

The program is played.py, which differs by one import, and has what each case is about.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Launcher

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parent / "played.py"
QUICK = "results failures restarts not_picklable programs"
ELAUNCH_ONLY = "interrupted"
"""torch raises its exception wherever the main thread is, also where nothing can be raised."""
SLOW = "no_restart_left odd_results this_python in_a_thread logs scripts by_spawn shared_arguments"

Seen = dict[str, dict[str, Any]]


def played(factory: pytest.TempPathFactory, cases: str, more: str = "", **env: str) -> Seen:
    """Return what is seen under both launchers, by case; ``more`` cases under elaunch."""
    launcher = Launcher(factory.mktemp("played"), forks=True)
    try:
        files = {name: launcher.directory / name / "seen.json" for name in ("torch", "elaunch")}
        for file in files.values():
            file.parent.mkdir()
        wanted = {"torch": cases.split(), "elaunch": [*cases.split(), *more.split()]}
        running = {
            name: launcher.start_command(
                [sys.executable, PROGRAM, name, file, *wanted[name]], env=env
            )
            for name, file in files.items()
        }
        ended = {name: process.wait(120.0) for name, process in running.items()}
    finally:
        launcher.close()
    assert {name: done.returncode for name, done in ended.items()} == dict.fromkeys(files, 0), ended
    return {
        name: json.loads(file.read_text().replace(str(file.parent), "DIRECTORY"))
        for name, file in files.items()
    }


def test_a_program_sees_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Results by rank, failures, restarts, signals, programs; a few are known by hand.

    No function here uses torch, which each launch would import.
    """
    both = played(tmp_path_factory, QUICK, ELAUNCH_ONLY, ELAUNCH_PRELOAD="none")
    seen = both["elaunch"]
    interrupted = seen.pop(ELAUNCH_ONLY)
    assert seen == both["torch"]
    assert interrupted == {"raised": "SignalException", "signal": "SIGINT"}
    place = [["0", "0", "3"], ["1", "1", "3"], ["2", "2", "3"]]
    assert [seen["results"][rank][:3] for rank in "012"] == place
    assert seen["results"]["2"][5:] == ["trainer", {"deep": [1, 2]}, 5]
    assert [each["exitcode"] for each in seen["failures"]] == [1, 3, -9]
    assert {each["first"] for each in seen["failures"]} == {1}
    assert seen["failures"][0]["message"] == "ValueError: boom"
    assert seen["restarts"] == {"0": ["1", "2"], "1": ["1", "2"]}


@pytest.mark.trial
@pytest.mark.parametrize("case", SLOW.split())
def test_a_program_sees_the_same_of_the_rest(
    tmp_path_factory: pytest.TempPathFactory, case: str
) -> None:
    """Spawned workers among others, which import torch and the main module."""
    seen = played(tmp_path_factory, case)
    assert seen["elaunch"] == seen["torch"]
