"""Resolve settings in a directory of the test's own, from words as they would be typed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from elaunch.cli.run import parse
from elaunch.config import Settings, resolve
from elaunch.errors import UsageError


class Job:
    """A directory with a script ``train.py``; ``settings`` and ``error`` resolve a line in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.write("train.py", "print('hello')\n")

    def write(self, name: str, text: str) -> Path:
        """Write a file below the directory."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def settings(self, line: str = "train.py", **environ: str) -> Settings:
        """Return the settings of one command line."""
        return self.of(line.split(), environ)

    def of(self, words: list[str], environ: Mapping[str, str]) -> Settings:
        """Return the settings of a command line in words."""
        line = parse(words)
        return resolve(line.flags, line.command, environ, self.directory)

    def error(self, line: str = "train.py", **environ: str) -> str:
        """Return the message of the usage error that a command line ends in."""
        with pytest.raises(UsageError) as caught:
            self.settings(line, **environ)
        return str(caught.value)

    def notices(self, line: str, **environ: str) -> str:
        """Return the notices of a command line in one text."""
        return "\n".join(self.settings(line, **environ).notices)
