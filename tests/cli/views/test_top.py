"""``elaunch top`` as a command: on a terminal, without one, without textual."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.views.test_status import ROOT, Terminal
from tests.views.conftest import Play, environ, play

__all__ = ["environ", "play"]

COMMAND = [sys.executable, "-m", "elaunch", "top"]
WITHOUT_TEXTUAL = [
    *(sys.executable, "-c"),
    "import sys; sys.modules['textual'] = None; sys.argv[0] = 'elaunch'\n"
    "from elaunch.__main__ import main; sys.exit(main())",
    "top",
]


@pytest.mark.slow
def test_on_a_terminal_of_24_lines(play: Play, environ: dict[str, str]) -> None:
    """It draws, takes keys, and leaves the terminal as it was."""
    agent = play(2)
    terminal = Terminal(environ, columns=80, rows=24, command=COMMAND)
    terminal.wait_for("rank 1")
    terminal.type("w")
    terminal.wait_for("No round has failed")
    terminal.type("q")
    assert terminal.ended() == 0
    assert terminal.text.rindex("\x1b[?1049l") > terminal.text.rindex("\x1b[?1049h")
    assert agent.process.poll() is None


@pytest.mark.slow
def test_without_textual_it_is_the_watch(play: Play, environ: dict[str, str]) -> None:
    """One line says what to install; then the same as ``status --watch``, until the end."""
    agent = play(2)
    terminal = Terminal(environ, "train", command=WITHOUT_TEXTUAL)
    terminal.wait_for(r"pip install 'elaunch\[top\]'")
    terminal.wait_for("RUNNING")
    agent.kill()
    terminal.wait_for("LOST")
    assert terminal.ended() == 0


@pytest.mark.slow
def test_without_a_terminal(play: Play, environ: dict[str, str], tmp_path: Path) -> None:
    """A clear error; the document for programs; textual is not imported for that."""
    agent = play(1)
    done = _run(environ, *COMMAND)
    assert done.returncode == 2 and "top draws on a terminal" in done.stderr
    found = json.loads(_run(environ, *COMMAND, "--json").stdout)
    assert found["dir"] == str(agent.run.path) and found["nodes"][0]["ranks"][0]["rank"] == 0
    code = "import sys, elaunch.cli.views.top, elaunch.top.pages; "
    code += "sys.exit('textual' in sys.modules)"
    assert _run(environ, sys.executable, "-c", code).returncode == 0


def _run(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env=environ, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
