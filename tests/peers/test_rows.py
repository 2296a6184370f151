"""Each row of rows.py, run by torchrun and by ``python -m elaunch.torchrun``: the same is seen.

What differs on purpose is in docs/torchrun.md, and is named in the row.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Launcher, Running, free_port
from tests.peers.rows import BAD, QUICK, ROWS, SCRIPTS, Row

pytestmark = pytest.mark.slow
LAUNCHERS = {"torchrun": "torch.distributed.run", "elaunch": "elaunch.torchrun"}
TORCH, PINNED = tuple(map(int, version("torch").split(".")[:2])), (2, 13)
DEADLINE = 100.0
NEWER = ("TORCHELASTIC_SIGNALS_TO_HANDLE",)  # torchrun up to 2.8 does not set it
NAMES = [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.trial]) for n in ROWS]


@dataclass(frozen=True)
class Seen:
    """What one launcher did; ``reports`` by round and rank."""

    codes: tuple[int, ...]
    reports: Mapping[tuple[int, int], dict[str, Any]]
    out: tuple[str, ...]
    err: str
    files: Mapping[str, str]
    error: tuple[str, int] | None

    @property
    def rounds(self) -> tuple[int, ...]:
        """The number of reports of each round."""
        counted = Counter(number for number, _ in self.reports)
        return tuple(counted[number] for number in sorted(counted))


class Play:
    """One launcher's start of a row, in a directory of its own."""

    def __init__(self, launcher: Launcher, module: str, row: Row, place: Path) -> None:
        self._place = place
        (place / "out").mkdir(parents=True)
        for name, text in SCRIPTS.items():
            (place / name).write_text(text)
        self._port = port = free_port()
        env = {name: self._filled(text, port) for name, text in row.env.items()}
        if TORCH < PINNED and module == LAUNCHERS["torchrun"]:  # else all its jobs have one port
            env.setdefault("PET_MASTER_PORT", str(port))
        self._running: list[Running] = [
            launcher.start_command(
                [sys.executable, "-m", module, *self._filled(line, port).split()],
                env={"OUT": str(place / "out"), **env},
                cwd=place,
            )
            for line in (row.line, *row.more)
        ]

    def _filled(self, text: str, port: int) -> str:
        place = str(self._place)
        return text.replace("CWD", place).replace("PORT", str(port)).replace("FILE", "error.json")

    def seen(self) -> Seen:
        """Wait for the end of it, and return what there is."""
        ended = [each.wait(DEADLINE) for each in self._running]
        return Seen(
            tuple(done.returncode for done in ended),
            dict(self._report(path) for path in (self._place / "out").glob("*[0-9]")),
            tuple(sorted(line for done in ended for line in done.stdout.splitlines())),
            "".join(done.stderr for done in ended),
            _files(self._place / "logs"),
            _error(self._place / "error.json"),
        )

    def _report(self, path: Path) -> tuple[tuple[int, int], dict[str, Any]]:
        rank, number = map(int, path.name.split("."))
        found: dict[str, Any] = json.loads(path.read_text())
        ports = {name: "PORT" for name, text in found.items() if text == str(self._port)}
        return (number, rank), found | ports


def _files(logs: Path) -> dict[str, str]:
    """Return the log files that have something in them, by place; filtered ones with sorted lines.

    elaunch keeps a copy of all streams, torchrun of those that are redirected.
    """
    found = {}
    for path in logs.glob("*/attempt_0/**/*.log"):
        text = path.read_text()
        if path.name.startswith("filtered"):
            text = "".join(sorted(text.splitlines(keepends=True)))
        found[re.sub(r"^.*/attempt_0/", "", str(path))] = text
    return found


def _error(path: Path) -> tuple[str, int] | None:
    if not path.exists():
        return None
    message = json.loads(path.read_text())["message"]
    return message["message"], message["errorCode"]


def played(launcher: Launcher, row: Row) -> dict[str, Seen]:
    """Return what both launchers did, started at the same time."""
    plays = {
        name: Play(launcher, module, row, launcher.directory / name)
        for name, module in LAUNCHERS.items()
    }
    return {name: play.seen() for name, play in plays.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_same_is_seen(elaunch: Launcher, name: str) -> None:
    """Exit code, what each worker finds, streams, files, the launcher's own error file."""
    row = ROWS[name]
    seen = played(elaunch, row)
    if "unrecognized arguments" in seen["torchrun"].err and TORCH < PINNED:
        pytest.skip("this torchrun has no such flag")
    for launcher, each in seen.items():
        told = f"{launcher}: {each}"
        assert row.code in (None, *each.codes) and len(set(each.codes)) == 1, told
        assert each.rounds == row.rounds, told
        assert each.error == row.error, told
        assert row.err in each.err, told
        last = {rank: found for (number, rank), found in each.reports.items()
                if number == len(row.rounds) - 1}  # fmt: skip
        for found in last.values():
            assert {key: found[key] for key in row.env_is} == row.env_is, told
        if row.out:
            assert each.out == tuple(sorted(row.out)), told
        if row.files is not None:
            assert {place: each.files.get(place) for place in row.files} == row.files, told
    assert _differences(seen, row) == {}


def _differences(seen: Mapping[str, Seen], row: Row) -> dict[str, Any]:
    """Return what the launchers' workers report differently: torchrun's and elaunch's."""
    torchruns, own = (seen[name].reports for name in ("torchrun", "elaunch"))
    return {
        f"{name} of {key}": (found[name], own[key].get(name))
        for key, found in torchruns.items()
        for name in found
        if name not in row.unlike and found[name] != own[key].get(name)
        if found[name] is not None or name not in NEWER
    }


@pytest.mark.trial
@pytest.mark.parametrize("name", BAD)
def test_a_wrong_line_starts_nothing(elaunch: Launcher, name: str) -> None:
    """torchrun ends with 1 or 2, elaunch always with 2 (docs/torchrun.md)."""
    seen = played(elaunch, Row(BAD[name]))
    assert seen["torchrun"].codes[0] in (1, 2), seen
    assert seen["elaunch"].codes == (2,), seen
    assert [each.reports for each in seen.values()] == [{}, {}]
