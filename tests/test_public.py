"""What a script may import: the list, its types, and that no module hides a name of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import elaunch

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "elaunch"
NAMES = [name for name in elaunch.__all__ if name != "__version__"]


def test_type_checkers_see_the_same_names() -> None:
    """The stub and the table that is used at run time."""
    stub = (PACKAGE / "__init__.pyi").read_text()
    assert sorted(re.findall(r" as (\w+)$", stub, re.M)) == sorted(NAMES)


def test_no_module_has_a_public_name() -> None:
    """Importing it would put it in the place of what a script asks for."""
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {p.name for p in PACKAGE.iterdir()}
    assert not modules & set(NAMES)


def test_every_name_is_there_and_nothing_is_loaded_before() -> None:
    """A command does not pay for what scripts use."""
    code = (
        "import sys, elaunch\n"
        "print([m for m in sys.modules if m.startswith('elaunch.') or m == 'torch'])\n"
        "elaunch.nothing\n"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.stdout == "[]\n"
    assert done.stderr.endswith("AttributeError: module 'elaunch' has no attribute 'nothing'\n")
    for name in NAMES:
        getattr(elaunch, name)
    assert sorted(set(elaunch.__all__) - set(dir(elaunch))) == []


def test_the_api_page_says_who_calls_and_what_blocks() -> None:
    """For each call: a sentence about either, with a verb; a block of code is none."""
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in (ROOT / "docs" / "api.md").read_text().splitlines()
        if line.startswith("| [`")
    ]
    assert len(rows) > 40
    verb = re.compile(r"\b(blocks|not block|waits?|returns?)\b", re.IGNORECASE)
    assert [row[0] for row in rows if not row[1] or not verb.search(row[2])] == []
    cells = {row[0].partition("`]")[0].strip("[`"): row for row in rows}
    for call in ("TrainContext.report_metrics", "Context.heartbeat", "elaunch.info"):
        assert cells[call][2].startswith("It does not block")
    for call in ("allgather", "gather", "broadcast", "in_turn"):
        assert "locks until" in cells[f"DistributedContext.{call}"][2]
    for call in ("save", "load", "store_path", "commit", "reserve", "check_same"):
        assert "locks until" in cells[f"CheckpointContext.{call}"][2]
        assert "`PeerLost`" in cells[f"CheckpointContext.{call}"][3]
