"""Rank 0 floods its connection to the agent with reports; rank 1 fails with 3 meanwhile.

``flooding.py OP``: what rank 0 says again and again. It outlives SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from elaunch.wire.local import LocalChannel, connect
from elaunch.wire.progress import ProgressPage
from elaunch.wire.worker import WIRE

SECONDS = 100.0


def main() -> None:
    """Do what the rank is for."""
    started = Path(sys.argv[2])
    if os.environ["RANK"] == "1":
        while not started.exists():
            time.sleep(0.01)
        sys.exit(3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = LocalChannel(connect(Path(os.environ["ELAUNCH_AGENT_SOCKET"]), SECONDS))
    page = ProgressPage()
    channel.send({"op": "worker", "wire": WIRE, "round": 0, "local_rank": 0}, [page.fd], SECONDS)
    said = {"op": sys.argv[1], "kind": "resize", "reason": "flood"}
    number = 0
    while True:
        number += 1
        if number == 1000:
            started.touch()
        channel.send({**said, "grace": number}, (), SECONDS)


main()
