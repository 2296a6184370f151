"""``elaunch man``: the page has all commands and flags, and man shows it without a warning."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from elaunch.cli import COMMANDS, execute
from elaunch.config.flags.table import FLAGS


def test_all_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """As groff sets it, where there is one; no line is taken as a request."""
    assert execute(["man"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(".TH ELAUNCH 1 ")
    requests = {line.split()[0] for line in page.splitlines() if line[:1] in (".", "'")}
    assert requests <= {".TH", ".SH", ".SS", ".TP", ".PP", ".B", ".BR"}
    for name in COMMANDS:
        assert f".SS elaunch {name}\n" in page
    for flag in FLAGS:
        assert f"\\-\\-{flag.name}".replace("\\-", "-") in page.replace("\\-", "-")
    assert ".SS elaunch checkpoints verify\n" in page
    if shutil.which("groff"):
        argv = ["groff", "-man", "-Tascii", "-ww", "-z"]
        done = subprocess.run(argv, input=page, capture_output=True, text=True, check=True)
        assert done.stderr == ""
