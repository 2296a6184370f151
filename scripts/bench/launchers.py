"""The two launchers, as data: how each is called and what it needs in its environment."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

JOBS = Path(__file__).resolve().parent / "jobs"
TORCHRUN = "torchrun"
ELAUNCH = "elaunch"

# Without it torchrun's workers share one store over all restarts, and most restarts hang or fail.
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True)
class Launcher:
    """One launcher: its program and the arguments that make it run a job on this machine."""

    name: str
    program: str
    run: tuple[str, ...]
    for_restarts: Mapping[str, str] = field(default_factory=dict)

    def command(
        self, job: str, workers: int, flags: Sequence[str] = (), args: Sequence[str] = ()
    ) -> list[str]:
        """Return the command line that runs ``jobs/<job>.py`` with ``args``."""
        count = ("--nproc-per-node", str(workers))
        return [self.program, *self.run, *count, *flags, str(JOBS / f"{job}.py"), *args]


def find(name: str) -> Launcher:
    """Return the launcher of this interpreter's environment, else the one on the PATH.

    Raises:
        FileNotFoundError: no such command is installed.
    """
    beside = Path(sys.executable).parent / name
    program = str(beside) if beside.exists() else shutil.which(name)
    if program is None:
        raise FileNotFoundError(f"no {name} beside {sys.executable} nor on the PATH")
    if name == TORCHRUN:
        return Launcher(name, program, ("--standalone",), FRESH_STORE)
    return Launcher(name, program, ("run",))
