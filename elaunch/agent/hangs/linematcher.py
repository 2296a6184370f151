"""The process that matches workers' output against ``--progress-regex``, and nothing else.

Python's ``re`` cannot be stopped, and keeps Python's lock: a pattern that backtracks may need hours
for a line of 50 bytes. So the agent sends the lines here (elaunch.agent.hangs.progress), and the
kernel ends this process when a line takes LONGEST_S of processor time.

It is run by its path, without site-packages: ``linematcher.py SOCKET TABLE PATTERN``. Each packet
of the socket is a HEADER and lines. What has matched is in the file TABLE, a ROW for each local
rank. The socket's end is this process's.
"""

from __future__ import annotations

import os
import re
import signal
import struct
import sys
import time
from typing import Final

HEADER: Final = struct.Struct("=qq")
"""The round, counted by the agent, and the local rank."""
ROW: Final = struct.Struct("=qqqd")
"""That round, the lines that have matched in it, the step or NO_STEP, when the newest came."""
NO_STEP: Final = -1
LONGEST: Final = 4096
"""Bytes of a line that are looked at."""
LONGEST_S: Final = 1.0
PACKET: Final = 1 << 18


def main() -> None:
    """Match all lines until the socket ends."""
    connection, table, pattern = int(sys.argv[1]), int(sys.argv[2]), re.compile(sys.argv[3])
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGINT):  # some signal all processes of a job at once
        signal.signal(number, signal.SIG_IGN)
    while packet := os.read(connection, PACKET):
        begun, local_rank = HEADER.unpack_from(packet)
        for line in re.split(rb"[\r\n]+", packet[HEADER.size :]):
            signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_S)
            found = pattern.search(line[:LONGEST].decode("utf-8", "replace")) if line else None
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            if found is not None:
                _note(table, begun, local_rank, _step(found))


def _note(table: int, begun: int, local_rank: int, step: int) -> None:
    place = ROW.size * local_rank
    before = os.pread(table, ROW.size, place).ljust(ROW.size, b"\0")
    noted_in, count, known, _ = ROW.unpack(before)
    if noted_in != begun:
        count, known = 0, NO_STEP
    newest = known if step == NO_STEP else step
    os.pwrite(table, ROW.pack(begun, count + 1, newest, time.monotonic()), place)


def _step(found: re.Match[str]) -> int:
    if found.re.groups == 0 or found[1] is None:
        return NO_STEP
    try:
        step = int(found[1].replace(",", ""))
    except ValueError:  # the group took something else; the line is progress all the same
        return NO_STEP
    return step if 0 <= step < 1 << 63 else NO_STEP


if __name__ == "__main__":
    main()
