"""One run of a launcher, in a directory of its own; nothing of it is left afterwards.

<directory>/work       working directory of the job
<directory>/stamps     $BENCH_DIR: what the workers report
<directory>/state      $XDG_STATE_HOME
<directory>/tmp        $TMPDIR
<directory>/output     stdout and stderr of the launcher and its workers
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import procfs

CLEAR_PREFIXES = ("PET_", "ELAUNCH_", "TORCHELASTIC_", "TORCH_", "BENCH_")
CLEAR_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOGLEVEL"),
    "PYTHONDONTWRITEBYTECODE",  # with it a checkout, unlike an installed torch, is compiled anew
)
POLL = 0.02
CLEAN_UP_SECONDS = 10.0


class JobError(Exception):
    """A job did not do what the sample needs; the message ends with its last output."""


class Job:
    """A launcher and all that it started; a context that kills and removes it all at its end."""

    def __init__(
        self, root: Path, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.directory = root / secrets.token_hex(4)
        self.work = self.directory / "work"
        self.stamps = self.directory / "stamps"
        self.state = self.directory / "state"
        self.output = self.directory / "output"
        self._command = list(command)
        self._extra = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self.started = 0.0

    def __enter__(self) -> Job:
        for path in (self.work, self.stamps, self.state, self.directory / "tmp"):
            path.mkdir(parents=True)
        environment = self._environment()
        with self.output.open("wb") as output:
            self.started = time.monotonic()
            self._process = subprocess.Popen(
                self._command,
                cwd=self.work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        procfs.kill_job(self.directory, CLEAN_UP_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(CLEAR_PREFIXES) and name not in CLEAR_NAMES
        }
        own = {
            "BENCH_DIR": str(self.stamps),
            "XDG_STATE_HOME": str(self.state),
            "TMPDIR": str(self.directory / "tmp"),
            "TZ": "UTC",
        }
        return {**kept, **own, **self._extra}

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The launcher's own process, the agent."""
        if self._process is None:
            raise RuntimeError("the job was not started")
        return self._process

    def pids(self) -> set[int]:
        """Return every living process of the job, the agent included."""
        return procfs.job_pids(self.directory)

    def read_stamps(self, name: str) -> dict[tuple[int, int], dict[str, Any]]:
        """Return the stamps ``name`` that are written, by (round, rank)."""
        found = {}
        for path in self.stamps.glob(f"{name}.*.*"):
            text = path.read_text()
            if text:  # else it is being written
                _, round_number, rank = path.name.rsplit(".", 2)
                found[int(round_number), int(rank)] = json.loads(text)
        return found

    def wait_stamps(
        self, name: str, count: int, timeout: float
    ) -> dict[tuple[int, int], dict[str, Any]]:
        """Wait until ``count`` stamps ``name`` are written and return them.

        Raises:
            JobError: the launcher ended first, or ``timeout`` seconds passed.
        """
        deadline = time.monotonic() + timeout
        while len(found := self.read_stamps(name)) < count:
            if self.process.poll() is not None:
                raise self.error(f"ended with {self.process.returncode} before it was ready")
            if time.monotonic() > deadline:
                raise self.error(f"{len(found)} of {count} workers ready after {timeout:g} s")
            time.sleep(POLL)
        return found

    def wait(self, timeout: float) -> tuple[int, float]:
        """Wait for the launcher's end; return its exit code and the seconds from its start.

        Raises:
            JobError: it was still running after ``timeout`` seconds.
        """
        # Popen.wait(timeout) looks every 50 ms, which would be most of what is measured here.
        pidfd = os.pidfd_open(self.process.pid)
        try:
            ended = bool(select.select([pidfd], [], [], timeout)[0])
            seconds = time.monotonic() - self.started
        finally:
            os.close(pidfd)
        if not ended:
            raise self.error(f"still running after {timeout:g} s")
        return self.process.wait(), seconds

    def expect_exit(self, timeout: float, code: int = 0) -> float:
        """Wait for the end with exit code ``code`` and return the seconds from the start.

        Raises:
            JobError: another exit code, or no end within ``timeout`` seconds.
        """
        found, seconds = self.wait(timeout)
        if found != code:
            raise self.error(f"exit code {found} instead of {code}")
        return seconds

    def failure_record(self, round_number: int) -> dict[str, Any]:
        """Return elaunch's failure report of a round; empty when there is none."""
        for path in self.state.glob(f"elaunch/runs/*/failure-{round_number}.json"):
            record: dict[str, Any] = json.loads(path.read_text())
            return record
        return {}

    def error(self, what: str) -> JobError:
        """Return an error that says ``what`` and quotes the last lines of the output."""
        lines = self.output.read_text(errors="replace").splitlines()
        return JobError(" | ".join([what, *(line.strip() for line in lines[-3:])])[:600])
