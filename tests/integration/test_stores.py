"""Stores and process groups that scripts make: after a restart, again in one process, private ones.

Under torchrun 2.13 a group that is made again in one process fails, and a private ``tcp://`` store
hangs; so torchrun is no reference here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.parity.launches import HERE
from tests.launching import Launcher

pytestmark = pytest.mark.slow

# torch's own message where rank 0 may not host the store at the launcher's address.
NOTE = re.compile(r"TCPStore\.cpp:\d+\] \[c10d\] The server socket on \d+ has failed to bind")


def results(directory: Path) -> dict[str, Any]:
    """Return what each rank of each round found: "<round>-<rank>" → results."""
    return {
        path.stem.removeprefix("stores-"): json.loads(path.read_text())
        for path in sorted(directory.glob("stores-*.json"))
    }


@pytest.mark.parametrize(
    ("options", "agent_store", "again"),
    [(["--start-method", "spawn"], "1", []), ([], "True", ["again"])],
    ids=["spawn", "fork"],
)
def test_stores_of_scripts(
    elaunch: Launcher, tmp_path: Path, options: list[str], agent_store: str, again: list[str]
) -> None:
    """In both rounds: env://, a part of the group, a TCPStore, tcp://, and again where mended."""
    words = ["run", *options, "--nproc-per-node", "2", "--max-restarts", "1"]
    done = elaunch.run(
        [*words, HERE / "stores.py", *again], env={"PARITY_OUT": str(tmp_path)}, deadline=110.0
    )
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert sorted(found) == ["0-0", "0-1", "1-0", "1-1"]
    for result in found.values():
        assert result.pop("round") in ("0", "1")
        assert result.pop("agent store") == agent_store
        assert result.pop("own store") == "a value"
        assert result.pop("variable") is True
        assert set(result.values()) == {3}
        assert ("again in one process" in result) == bool(again)
    notes = NOTE.findall(done.stderr)
    assert len(notes) == (0 if agent_store == "True" else 2)  # one per round, of rank 0
