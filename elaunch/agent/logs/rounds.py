"""One round of workers' output: its streams, its files, and how they are opened and closed.

A round owns its files: a thread of its own opens them, waits for the end of its streams and closes
them. Storage that takes long for either holds up neither the agent's loop nor the next round.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product

from elaunch.agent.logs.console import Console, Speaker
from elaunch.agent.logs.files import (
    Complaint,
    LineFilter,
    LogFile,
    make_directories,
    round_directory,
)
from elaunch.agent.logs.plan import STREAM_BITS, LogPlan
from elaunch.agent.logs.streams import OutputStream, open_channel


@dataclass
class LogRound:
    """The streams and files of one round.

    Args:
        number: round number.
        ranks: local rank to global rank.

    Attributes:
        streams: by local rank and name (``stdout``, ``stderr``); kept for `OutputStream.tail`.
        live: the streams that have not ended.
        filtered: the filtered files, by name of the stream.
        held: what somebody still had open when the round was given up, in words.
        opened: set when the files are open, as far as they can be.
        ended: set when all streams have ended, and what was read is on file.
        done: set when all files are closed.
    """

    number: int
    ranks: Mapping[int, int]
    streams: dict[tuple[int, str], OutputStream] = field(default_factory=dict)
    live: set[OutputStream] = field(default_factory=set)
    filtered: dict[str, LogFile] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    opened: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def serve(self, plan: LogPlan, complain: Complaint, read: Callable[[], object]) -> None:
        """Open the files, in a thread of their own, and close them when the streams have ended.

        Args:
            plan: where the files are.
            complain: called for each failure.
            read: has the streams read from now on.
        """
        run = partial(self._run, plan, complain, read)
        threading.Thread(target=run, name=f"log files {self.number}", daemon=True).start()

    def _run(self, plan: LogPlan, complain: Complaint, read: Callable[[], object]) -> None:
        try:
            open_files(self, plan, complain)
        finally:
            self.opened.set()
            read()
        self.ended.wait()
        for file in (*(stream.file for stream in self.streams.values()), *self.filtered.values()):
            if file is not None:
                file.close()
        self.done.set()


def open_streams(
    opened: LogRound, plan: LogPlan, consoles: Mapping[str, Console]
) -> dict[int, tuple[int, int]]:
    """Open every stream of a round.

    Args:
        opened: the round; its `streams` and `live` are filled.
        plan: what is shown, and how.
        consoles: by name of the stream.

    Returns:
        For each local rank the write ends of stdout and stderr.

    Raises:
        OSError: no descriptors left; nothing stays open.
    """
    shown = [rank for rank in opened.ranks if any(plan.shows(rank, n) for n in STREAM_BITS)]
    ends: dict[tuple[int, str], int] = {}
    try:
        for local_rank, name in product(opened.ranks, STREAM_BITS):
            console = consoles[name] if plan.shows(local_rank, name) else None
            tees = plan.tees(local_rank, name)
            read_end, write_end, is_pty = open_channel(None if tees else console)
            terminal = console if is_pty else None
            stream = OutputStream(read_end, local_rank, opened.ranks[local_rank], name, terminal)
            opened.streams[local_rank, name] = stream
            if plan.listener is not None:
                stream.listener = plan.listener(local_rank)
            ends[local_rank, name] = write_end
            stream.follow_size()
            if console is not None:
                prefix = plan.prefix(local_rank, stream.rank) if tees else b""
                alone = plan.at_once and len(shown) == 1
                stream.speaker = Speaker(console, local_rank, prefix=prefix, eager=alone)
    except OSError:
        for fd in [*ends.values(), *(stream.fd for stream in opened.streams.values())]:
            os.close(fd)
        raise
    opened.live.update(opened.streams.values())
    return {rank: (ends[rank, "stdout"], ends[rank, "stderr"]) for rank in opened.ranks}


def open_files(opened: LogRound, plan: LogPlan, complain: Complaint) -> None:
    """Create the directories and files of a round; what cannot be created is done without.

    Args:
        opened: the round, with its streams.
        plan: where the files are; none are made when it has no `log_root`.
        complain: called for each failure.
    """
    if plan.log_root is None:
        return
    try:
        make_directories(plan.log_root, opened.number, sorted(opened.ranks))
    except OSError as exc:
        complain(plan.log_root, exc)
        return
    base = round_directory(plan.log_root, opened.number)
    for name in STREAM_BITS:
        file = LogFile(base / f"filtered_{name}.log", complain)
        if plan.filters(name) and file.open():
            opened.filtered[name] = file
    for (local_rank, name), stream in opened.streams.items():
        file = LogFile(base / str(local_rank) / f"{name}.log", complain)
        stream.file = file if file.open() else None
        any_tee = any(plan.tees(other, name) for other in opened.ranks)
        if name in opened.filtered and (plan.tees(local_rank, name) or not any_tee):
            prefix = plan.prefix(local_rank, stream.rank)
            stream.line_filter = LineFilter(opened.filtered[name], plan.filters(name), prefix)
