"""Run ``elaunch`` with an agent that is held up, or killed, in the middle of a save.

Arguments: a directory, a word, then those of ``elaunch``. The word is ``write`` or ``commit``, and
a step: before that is done for the checkpoint of that step, the file ``reached`` is made in the
directory, and the agent waits until there is a file ``go``. It says after 4 s what it waits for.
"""

import runpy
import sys
import threading
from pathlib import Path

from elaunch.agent import patience
from elaunch.checkpoint.storage.posix import PosixStorage

PAUSE = threading.Event()
patience.FIRST_S = 4.0
directory, (word, step) = Path(sys.argv.pop(1)), sys.argv.pop(1).split("=")
name = {"write": "write_shard", "commit": "commit"}[word]
real = getattr(PosixStorage, name)


def held_up(storage, stage, *args):
    if stage.step == int(step):
        (directory / "reached").touch()
        while not (directory / "go").exists():
            PAUSE.wait(0.02)
    return real(storage, stage, *args)


setattr(PosixStorage, name, held_up)
runpy.run_module("elaunch", run_name="__main__", alter_sys=True)
