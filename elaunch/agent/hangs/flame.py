"""A flame graph of one process, by py-spy: for the command on its node, and for other agents."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Final

from elaunch import text
from elaunch.agent.hangs.stacks import py_spy

MISSING: Final = "py-spy is not installed: pip install 'elaunch[stacks]'"
OVERDUE_S: Final = 30.0
"""Seconds that py-spy has beyond those that it is to look."""


def record(pid: int, seconds: int, path: Path, native: bool) -> str:
    """Have py-spy write an SVG of the next ``seconds``; return why there is none, or "".

    An interrupt ends py-spy, too, and is raised again.
    """
    program = py_spy()
    if program is None:
        return MISSING
    # Without frames of C the process need not be stopped for each sample.
    how = "--native" if native else "--nonblocking"
    argv = [program, "record", how, "--pid", str(pid), "--duration", str(seconds)]
    argv += ["--output", os.fspath(path)]
    # In an agent its exit code goes to the reaper, which waits for all children.
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=seconds + OVERDUE_S)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.communicate()
            raise
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
    lines = [line.strip() for line in (err + out).decode("utf-8", "replace").splitlines()]
    if not process.returncode and path.exists() and path.stat().st_size:
        return ""
    why = next((line for line in lines if line.startswith("Error")), " ".join(lines[:1]))
    if "No stack counts found" in why:
        return (
            "its threads have only waited, and the graph is of those that compute: `elaunch "
            "stacks` shows where they are"
        )
    return f"py-spy has written nothing: {text.one_line(why)}"
