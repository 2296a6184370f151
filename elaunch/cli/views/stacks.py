"""``elaunch stacks`` and ``elaunch profile``: where the workers of a running job are.

docs/status.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import click

from elaunch import text
from elaunch.endings import INTERRUPTED
from elaunch.errors import UsageError

SILENT = 69
"""Exit code where nothing is known of some node or rank."""
LONGEST_S: Final = 3600


@click.command("stacks")
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--native", is_flag=True, help="Frames of C and C++, too (py-spy).")
@click.option("--locals", "values", is_flag=True, help="The frames' variables, too (py-spy).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/status.md).")
def stacks(run: str | None, native: bool, values: bool, as_json: bool) -> int:
    """Show the Python stacks of all ranks of RUN, on all its nodes, and change nothing.

    Ranks whose main threads are at the same place are one group; the smallest groups come first.
    RUN is a run id of this machine, or the beginning of one; without it the newest run.
    """
    from elaunch.monitor.nodeviews import stacks_of
    from elaunch.runs import directory

    options = [name for name, on in (("--native", native), ("--locals", values)) if on]
    found = directory.newest(os.environ) if run is None else directory.find(run, os.environ)
    taken = stacks_of(found, options)
    if as_json:
        click.echo(json.dumps(taken.to_dict(), indent=2))
    else:
        click.echo("\n".join(text.block(line) for line in taken.lines()))
    return SILENT if taken.silent or taken.problems else 0


@click.command("profile")
@click.argument("run", metavar="RUN")
@click.argument("duration", default="10s", metavar="[DURATION]")
@click.option(
    "--rank", type=click.IntRange(min=0), required=True, metavar="R", help="Of this rank."
)
@click.option("--native", is_flag=True, help="Frames of C and C++, too.")
@click.option(
    *("-o", "--output"),
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file.  [default: profile-RUN-rankR.svg]",
)
def profile(run: str, duration: str, rank: int, native: bool, output: Path | None) -> int:
    """Write a flame graph (SVG) of one rank of RUN on this node, of the next DURATION.

    DURATION is 10s, 2m; 10s if it is left out. The rank trains on meanwhile. RUN is a run id of
    this machine, or the beginning of one. It takes py-spy: pip install 'elaunch[stacks]'.
    """
    from elaunch.runs import directory, statedir

    seconds = _seconds(duration)
    found = directory.find(run, os.environ)
    name, record = directory.run_id_of(found), found.read_state()
    pids = {one["rank"]: one["pid"] for one in record["workers"] if one["state"] == "RUNNING"}
    pid = pids.get(rank)
    if not directory.is_live(found) or not pids:
        raise UsageError(f"RUN {name} does not run: `elaunch status {name}` tells how it ended")
    if pid is None:
        raise UsageError(
            f"--rank {rank} of run {name} does not run on this node; here: {text.ranks(pids)}; "
            "name one of these, or ask on that rank's node"
        )
    if record["agent"]["host"] != os.uname().nodename:
        raise UsageError(f"RUN {name} runs on {record['agent']['host']}: ask there")
    path = output or Path(f"profile-{statedir.file_name(name)}-rank{rank}.svg")
    return _record(pid, seconds, path, native)


def _seconds(raw: str) -> int:
    match = re.fullmatch(r"(\d{1,5})(s|m|)", raw, re.ASCII)
    seconds = int(match[1]) * (60 if match[2] == "m" else 1) if match else 0
    if not 0 < seconds <= LONGEST_S:
        raise UsageError(f"DURATION {raw}: is none; give 1s to 3600s, as 10s or 2m")
    return seconds


def _record(pid: int, seconds: int, path: Path, native: bool) -> int:
    """Have py-spy write the graph; return the exit code."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if program is None:
        raise UsageError("py-spy is not installed: pip install 'elaunch[stacks]'")
    place = path.absolute().parent
    if not os.access(place, os.W_OK):
        raise UsageError(f"--output {path}: {place} cannot be written; name a file elsewhere")
    # Without frames of C the process need not be stopped for each sample.
    how = "--native" if native else "--nonblocking"
    argv = [program, "record", how, "--pid", str(pid), "--duration", str(seconds)]
    argv += ["--output", str(path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=seconds + 60)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.communicate()
            return INTERRUPTED
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
    lines = [line.strip() for line in (err + out).decode("utf-8", "replace").splitlines()]
    if process.returncode or not path.exists() or not path.stat().st_size:
        why = next((line for line in lines if line.startswith("Error")), " ".join(lines[:1]))
        click.echo(f"elaunch: py-spy has written nothing: {text.one_line(why)}", err=True)
        return SILENT
    click.echo(f"{path}: {seconds} s of pid {pid}")
    return 0
