"""The record of an exception is written where the launcher asked for it, or not at all."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from elaunch import env, errorrecord
from elaunch.agent.failure import errorfile


def raised() -> ValueError:
    """Return an exception that has been raised."""
    try:
        raise ValueError("boom é\udcff")
    except ValueError as error:
        return error


def test_the_agent_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also text that is no UTF-8, and outside of any except clause."""
    monkeypatch.setenv(env.ERROR_FILE, str(tmp_path / "error.json"))
    errorrecord.write(raised())
    found = errorfile.read(str(tmp_path / "error.json"))
    assert found and not found.problem and found.timestamp
    assert found.message.startswith("ValueError: boom é")
    assert 'raise ValueError("boom' in found.callstack
    whole = json.loads((tmp_path / "error.json").read_text())
    assert whole["message"]["message"] == "ValueError: boom é\udcff"


def test_without_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written."""
    monkeypatch.delenv(env.ERROR_FILE, raising=False)
    monkeypatch.chdir(tmp_path)
    errorrecord.write(raised())
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line in the log names it; the error itself is not replaced by another."""
    monkeypatch.setenv(env.ERROR_FILE, str(tmp_path / "none" / "error.json"))
    with caplog.at_level(logging.WARNING):
        errorrecord.write(raised())
    assert "none/error.json cannot be written: No such file or directory" in caplog.text
