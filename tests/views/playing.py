"""Starts and directs the process of ``tests/views/played_agent.py``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from elaunch.runs.directory import RunDir

ROOT = Path(__file__).parent.parent.parent


class PlayedAgent:
    """A process that keeps a run directory as an agent does; its run ends with the block."""

    def __init__(self, environ: dict[str, str], workers: int = 2, **record: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.views.played_agent", str(workers), json.dumps(record)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            cwd=ROOT,
            text=True,
        )
        self.run = RunDir(Path(self._line()))

    def __enter__(self) -> PlayedAgent:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)
            self._stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()

    @property
    def _stdin(self) -> IO[str]:
        assert self.process.stdin is not None
        return self.process.stdin

    def write(self, **changes: object) -> None:
        """Change fields of the record, as the agent does when something happened."""
        self._stdin.write(json.dumps(changes) + "\n")
        self._stdin.flush()
        assert self._line() == "ok"

    def record(self) -> dict[str, Any]:
        """Return the record in the run directory."""
        return dict(self.run.read_state())

    def kill(self) -> None:
        """End the agent without a word, as the OOM killer does."""
        self.process.kill()
        self.process.wait()

    def end(self, **changes: object) -> None:
        """Write the last record and end."""
        self.write(**changes)
        self._stdin.close()
        self.process.wait(60)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def final(state: str, record: dict[str, Any], **changes: object) -> dict[str, Any]:
    """Return the changes that end a run in ``state`` 65 s after its start."""
    ended_at = record["started_at"] + 65
    workers = [
        {**worker, "state": "SUCCEEDED", "exit": "exit code 0", "exit_code": 0}
        for worker in record["workers"]
    ]
    return {"state": state, "ended_at": ended_at, "workers": workers, **changes}
