"""Exit noticed by the loop: from just before ``os._exit(7)`` of a worker without torch.

elaunch: to the moment when the agent's loop takes the event from its queue, ``noticed_monotonic``
of the failure report. torchrun: to the time of its log line ``failed (exitcode: 7)``.

The kernel takes a process apart before its parent learns of the exit. For a plain process that is
less than 1 ms; for one that was forked with torch in its memory it is several, which no launcher
can avoid, hence the two figures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import partial

from figures import Case, Figure, Options, Sample, Target, Trial
from job import Job
from launchers import ELAUNCH, TORCHRUN

TIMEOUT = 60.0
LOGGED = re.compile(r"E(\d{4} \d\d:\d\d:\d\d\.\d{6}) .*failed \(exitcode: 7\)")


def cases(options: Options) -> list[Case]:
    """Return the case of a plain process, and for information that of the fork server."""
    plain = Figure("notice", "exit noticed by the loop", "ms", Target("at_most", 2.0))
    forked = Figure("notice-forked", "… of a worker that was forked with torch", "ms")
    both = dict.fromkeys((TORCHRUN, ELAUNCH), options.repeats)
    ours = {ELAUNCH: options.repeats}
    return [
        Case("notice", plain.title, (plain,), partial(_measure, plain.key, "spawn"), both),
        Case("notice", forked.title, (forked,), partial(_measure, forked.key, "forkserver"), ours),
    ]


def _measure(key: str, start_method: str, trial: Trial) -> Mapping[str, Sample]:
    flags = ("--start-method", start_method) if trial.is_elaunch else ()
    with Job(trial.root, trial.launcher.command("exit_alone", 1, flags)) as job:
        code, _ = job.wait(TIMEOUT)
        stamp = job.read_stamps("exit").get((0, 0))
        if code == 0 or stamp is None:
            raise job.error(f"exit code {code}, stamp {stamp}")
        if trial.is_elaunch:
            noticed = job.failure_record(0).get("noticed_monotonic")
            left = stamp["mono"]
        else:
            noticed = _logged_at(job.output.read_text(errors="replace"), stamp["wall"])
            left = stamp["wall"]
        if noticed is None:
            raise job.error("the launcher left no time at which it noticed the exit")
    return {key: Sample((noticed - left) * 1000)}


def _logged_at(output: str, wall: float) -> float | None:
    """Return the time of torchrun's log line; it has no year, which ``wall`` supplies."""
    match = LOGGED.search(output)
    if match is None:
        return None
    year = datetime.fromtimestamp(wall, timezone.utc).year
    logged = datetime.strptime(f"{year}{match[1]}", "%Y%m%d %H:%M:%S.%f")
    return logged.replace(tzinfo=timezone.utc).timestamp()
