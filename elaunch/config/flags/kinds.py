"""What several flags have in common: kinds of values, and when a flag has no effect."""

from __future__ import annotations

from functools import partial

from elaunch.config import values
from elaunch.config.flags.flag import Flag, Kind

# When a flag has no effect; checks.py knows when that is so.
ALWAYS = ""
ON_ONE_NODE = "on one node"
ALONE = "on one node by itself"
WITH_PROGRAM = "with --no-python"
WITH_RUN_PATH = "with --run-path"
WITH_SPAWN = "with --start-method spawn"
WITHOUT_RESTARTS = "without --max-restarts"

COUNT = Kind(values.whole(0), "N", "0 or more")
SECONDS = Kind(values.seconds, "SECONDS", "0 or more seconds")
SIGNALS = Kind(values.signals, "SIGNAL,...", "comma-separated names of signals", comma=",")
STREAMS = Kind(
    values.streams,
    "STREAMS",
    "0 none, 1 stdout, 2 stderr, 3 both; or RANK:STREAMS,RANK:STREAMS",
    pairs=":",
)
SWITCH = Kind(values.switch, "", "nothing, or =yes / =no")
TEXTS = Kind(
    values.words, "TEXT,...", "comma-separated strings; ',,' for a comma inside one", comma=",,"
)
own = partial(Flag, torchrun=False)
switch = partial(Flag, kind=SWITCH, default="no")
