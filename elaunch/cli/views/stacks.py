"""``elaunch stacks`` and ``elaunch profile``: where the workers of a running job are.

docs/stacks.md.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from elaunch import text
from elaunch.cli import place as places
from elaunch.endings import INTERRUPTED
from elaunch.errors import UsageError
from elaunch.wire.control import LONGEST_S

if TYPE_CHECKING:
    from elaunch.runs.directory import RunDir
    from elaunch.views.store import JobStore

SILENT = 69
"""Exit code where nothing is known of some node or rank."""
_DURATION: Final = re.compile(r"(\d{1,5})(s|m|)", re.ASCII)


@click.command("stacks", context_settings={"token_normalize_func": places.normal})
@click.argument("run", required=False, metavar="[RUN]")
@click.option("--native", is_flag=True, help="Show frames of C and C++, too; needs py-spy.")
@click.option(
    "--locals", "values", is_flag=True, help="Show the variables of the frames, too; needs py-spy."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/stacks.md).")
@places.options
def stacks(run: str | None, native: bool, values: bool, as_json: bool, **place: str | None) -> int:
    """Show the Python stacks of all ranks of RUN, on all its nodes.

    The job goes on undisturbed. Ranks whose main threads are at the same place are one group; the
    smallest groups come first. RUN is a run id of this machine, the beginning of one, or a run
    directory; without it, the newest run. With --rdzv-backend and --rdzv-endpoint: a job in a
    store, from any machine that reaches it and the nodes.
    """
    from elaunch.runs import directory
    from elaunch.views.agents import stacks_of

    options = [name for name, on in (("--native", native), ("--locals", values)) if on]
    line = places.given(place, run)
    with ExitStack() as stack:
        found = places.agents(line, stack) if line else directory.named(run, os.environ)
        taken = stacks_of(found, options)
    if as_json:
        click.echo(json.dumps(taken.to_dict(), indent=2))
    else:
        click.echo("\n".join(text.block(line) for line in taken.lines()))
    return SILENT if taken.silent or taken.problems else 0


@click.command("profile", context_settings={"token_normalize_func": places.normal})
@click.argument("run", required=False, metavar="[RUN]")
@click.argument("duration", required=False, metavar="[DURATION]")
@click.option(
    "--rank", type=click.IntRange(min=0), required=True, metavar="R", help="Rank to profile."
)
@click.option("--native", is_flag=True, help="Show frames of C and C++, too.")
@click.option(
    *("-o", "--output"),
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write.  [default: profile-RUN-rankR.svg]",
)
@places.options
def profile(
    run: str | None,
    duration: str | None,
    rank: int,
    native: bool,
    output: Path | None,
    **place: str | None,
) -> int:
    """Write a flame graph (SVG) of one rank of RUN over the next DURATION.

    DURATION is 10s, 2m and the like; the default is 10s. The rank trains on. A rank of another node
    is profiled by that node's agent. The rank's node needs py-spy: pip install 'elaunch[stacks]'.
    RUN is a run id of this machine, the beginning of one, or a run directory; without it, the
    newest run. With --rdzv-backend and --rdzv-endpoint: a job in a store, from any machine that
    reaches it and the nodes.
    """
    from elaunch.agent.hangs import stacks
    from elaunch.runs import directory, statedir
    from elaunch.views.agents import profile_of

    if run and not duration and _DURATION.fullmatch(run) and not run.isdigit():
        run, duration = None, run
    seconds = _seconds(duration or "10s")
    line = places.given(place, run)
    with ExitStack() as stack:
        found: RunDir | JobStore
        if line:
            found, pid = places.agents(line, stack), None
            name = found.name
        else:
            found = directory.named(run, os.environ)
            name, pid = _on_this_machine(found, rank)
        path = output or Path(f"profile-{statedir.file_name(name)}-rank{rank}.svg")
        where = path.absolute().parent
        if not os.access(where, os.W_OK):
            raise UsageError(f"--output {path}: {where} cannot be written; name a file elsewhere")
        try:
            if pid is not None:
                problem = stacks.record(pid, seconds, path, native)
            else:
                pid, problem = profile_of(found, rank, seconds, path, native)
        except KeyboardInterrupt:
            return INTERRUPTED
    if problem == stacks.NO_PY_SPY:
        raise UsageError(problem)
    if problem:
        click.echo(f"elaunch: {problem}", err=True)
        return SILENT
    click.echo(f"{path}: {seconds} s of pid {pid}")
    return 0


def _on_this_machine(run: RunDir, rank: int) -> tuple[str, int | None]:
    """Return the run's id, and the rank's pid if it is here; UsageError if it is nowhere."""
    from elaunch.runs import directory

    name, record = directory.run_id_of(run), run.read_state()
    pids = {one["rank"]: one["pid"] for one in record["workers"] if one["state"] == "RUNNING"}
    if not directory.is_live(run) or not pids:
        raise UsageError(f"RUN {name} does not run: `elaunch status {name}` tells how it ended")
    pid = pids.get(rank)
    if pid is None and rank >= (record["world_size"] or 0):
        raise UsageError(
            f"--rank {rank} of run {name} does not run on this node; here: {text.ranks(pids)}; "
            "name one of these, or one of another node"
        )
    return name, pid if record["agent"]["host"] == os.uname().nodename else None


def _seconds(raw: str) -> int:
    match = _DURATION.fullmatch(raw)
    seconds = int(match[1]) * (60 if match[2] == "m" else 1) if match else 0
    if not 0 < seconds <= LONGEST_S:
        raise UsageError(f"DURATION {raw}: is none; give 1s to 3600s, as 10s or 2m")
    return seconds
