"""Reads what torch has recorded of each worker's collectives (elaunch.wire.recorder).

All workers are asked at once, and by one deadline: a worker that is stopped, or whose answer is too
long or is no answer of torch's, costs nothing but itself.

Of gloo's sends and receives, and of a group in the making, only the stack of a rank shows that it
waits: it waits since it was first seen there, if it has not been woken since, for the next of many
looks the same. All waits are as long as they were seen, also if the clock was set back.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from msgspec.structs import replace

from elaunch import atonce, proc
from elaunch.agent.hangs import stackdump, stacks
from elaunch.agent.hangs.collectives import CollectiveCall, RankPlace
from elaunch.agent.hangs.living import Living
from elaunch.agent.hangs.stackdump import Dump
from elaunch.agent.hangs.trace import at_times, place
from elaunch.agent.patience import bounded
from elaunch.agent.policy.turn import Round
from elaunch.files import open_regular
from elaunch.wire.local import short_address
from elaunch.wire.recorder import groups_path, socket_path

LONGEST: Final = 8 << 20
"""Bytes of an answer; 2,000 entries are 0.9 MB."""
LONGEST_GROUPS: Final = 1 << 20
_REQUEST: Final = (
    b"POST /handler/%s HTTP/1.1\r\nHost: worker\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)
TRACE: Final = b"fr_trace_json"
DEVICE_TRACE: Final = b"dump_nccl_trace_json"
"""NCCL's collectives are in a record of their own, which a torch without NCCL does not have."""
STACKS: Final = b"dump_traceback"

STACKS_S: Final = 0.01
"""Seconds for stacks that are only shown; a thread of Python gives its lock up after 5 ms."""

QUIET: Final = 2
"""So often the first thread of a process may have been woken that has waited all the time."""
SOURCE_S: Final = 0.1
"""Seconds for a file system to answer when the line at which a worker is is read."""


class Question(NamedTuple):
    """A question to the worker of a rank; ``handler`` is torch's name for it."""

    rank: int
    handler: bytes


class WorkerAnswers(NamedTuple):
    """The answers of a round's workers to each question, or why there is none.

    They answer at ``paths``; ``size`` is the job's. ``ended`` are the ranks that had ended with 0.
    Of ``rests`` nothing comes since their processes do nothing, for that reason (stacks.at_rest).
    """

    paths: Mapping[int, Path]
    size: int
    ended: Collection[int]
    of: Mapping[int, Mapping[bytes, bytes | OSError]]
    rests: Mapping[int, str]

    def dumps(self) -> dict[int, Dump]:
        """Return the stacks that have come."""
        said = {rank: answers.get(STACKS, b"") for rank, answers in self.of.items()}
        texts = {rank: one for rank, one in said.items() if isinstance(one, bytes)}
        dumps = {k: stackdump.parse(one.decode("utf-8", "replace")) for k, one in texts.items()}
        return {rank: dump for rank, dump in dumps.items() if dump is not None}

    def places(self) -> dict[int, RankPlace]:
        """Return where those are that have answered, and those that have ended."""
        places = {rank: RankPlace(ended=True) for rank in self.ended}
        for rank, answers in self.of.items():
            traces = {handler: one for handler, one in answers.items() if handler != STACKS}
            found = _read(rank, self.size, traces, self.paths[rank])
            if found is not None:
                why = self.rests.get(rank, "") if found.problem else ""
                places[rank] = replace(found, problem=why, stopped=True) if why else found
        return places


class Recorders:
    """Asks the workers of a round, which answer in ``run_dir``; any thread may."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.traces: tuple[bytes, ...] = (TRACE, DEVICE_TRACE)

    def places(self, living: Living, until: float) -> dict[int, RankPlace]:
        """Return where the living workers are, and the ended."""
        return self.ask(living, living.pids, self.traces, until).places()

    def ask(
        self,
        living: Living,
        pids: Mapping[int, int],
        handlers: Sequence[bytes],
        until: float,
        hurries: bool = False,
    ) -> WorkerAnswers:
        """Return what these workers answer until then (monotonic seconds), or when all have.

        If it ``hurries``, stacks are not waited for much longer than the rest takes.
        """
        begun = living.begun
        if begun is None:
            return WorkerAnswers({}, 0, (), {}, {})
        paths = {rank: worker_socket(self.run_dir, begun, rank) for rank in pids}
        questions = {Question(rank, one): paths[rank] for rank in pids for one in handlers}
        answers: dict[int, dict[bytes, bytes | OSError]] = {rank: {} for rank in pids}
        for question, answer in ask(questions, until, hurries).items():
            answers[question.rank][question.handler] = answer
        if any(isinstance(one.get(DEVICE_TRACE), NoRecordError) for one in answers.values()):
            self.traces = (TRACE,)  # all workers have one torch
        # Somebody who is there does not answer, not even that there is no such record.
        there = bytes | NoRecordError | FileNotFoundError
        silent = [
            k for k, one in answers.items() if not all(isinstance(a, there) for a in one.values())
        ]
        rests = {rank: stacks.at_rest(pids[rank]) for rank in silent}
        ended = living.ended - living.pids.keys()
        return WorkerAnswers(paths, begun.place.world_size, ended, answers, rests)

    def remove(self, begun: Round | None, kept: Collection[int] = ()) -> None:
        """Remove the sockets of a round; nobody can remove them for a worker that was killed.

        The ranks ``kept`` go on.
        """
        if begun is None:
            return
        gone = begun.own_ranks.difference(kept)
        paths = [worker_socket(self.run_dir, begun, rank) for rank in gone]

        def remove() -> None:
            for path in paths:
                path.unlink(missing_ok=True)
                groups_path(path).unlink(missing_ok=True)

        what = f"cannot remove the workers' sockets in {self.run_dir}"
        bounded(remove, None, what, self.run_dir)


def worker_socket(run_dir: Path, begun: Round, rank: int) -> Path:
    """Return where the worker of a rank answers."""
    local_rank = rank - begun.first_rank
    return socket_path(run_dir, begun.born(local_rank), local_rank)


class NoRecordError(OSError):
    """A worker answers that its torch has no such record."""


def ask(
    questions: Mapping[Question, Path], until: float, hurries: bool = False
) -> dict[Question, bytes | OSError]:
    """Return what each worker answers until then, or why it does not.

    A stack may wait for Python's lock; if it ``hurries``, only for as long as the other answers
    took, and STACKS_S at least.
    """
    answers: dict[Question, bytes | OSError] = {}
    began = time.monotonic()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
        for question, path in questions.items():
            try:
                connection = opened.enter_context(_asked(path, question.handler))
            except OSError as error:
                answers[question] = error
            else:
                selector.register(
                    connection, selectors.EVENT_READ, (question, connection, bytearray())
                )
        while waiting := [*selector.get_map().values()]:
            ready = selector.select(max(0.0, until - time.monotonic()))
            late = TimeoutError(errno.ETIMEDOUT, "no answer")
            data = [key.data for key in ([key for key, _ in ready] or waiting)]
            found = [(one, _receive(*one[1:]) if ready else late) for one in data]
            whole = [(one, answer) for one, answer in found if answer is not None]
            for (question, connection, _), answer in whole:
                answers[question] = answer
                selector.unregister(connection)
                connection.close()  # it may answer one at a time
            left = (key.data[0].handler for key in selector.get_map().values())
            if hurries and all(handler == STACKS for handler in left):
                now, hurries = time.monotonic(), False
                until = min(until, now + max(STACKS_S, now - began))
    return answers


def _asked(path: Path, handler: bytes) -> socket.socket:
    """Return a connection on which a worker was asked; nothing waits for the other side."""
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        )
        with short_address(path) as address:
            connection.connect(address)
        connection.send(_REQUEST % handler)
        undo.pop_all()
    return connection


def _receive(connection: socket.socket, received: bytearray) -> bytes | OSError | None:
    """Take what has come; return the answer's body when it is whole, or what is wrong with it."""
    try:
        data = connection.recv(1 << 18)
    except BlockingIOError:
        return None
    except OSError as error:
        return error
    received += data
    head, gap, body = received.partition(b"\r\n\r\n")
    if len(received) > LONGEST:
        return OSError(errno.EMSGSIZE, "its answer is too long")
    if not gap:
        return None if data else OSError(errno.ECONNRESET, "it has hung up")
    status, _, fields = head.lower().partition(b"\r\n")
    length = fields.partition(b"content-length:")[2].split(b"\r\n", 1)[0].strip()
    if status.split()[1:2] != [b"200"] or not length.isdigit():
        return NoRecordError(errno.EPROTO, "torch has no such record there")
    if len(body) >= int(length):
        return bytes(body[: int(length)])
    return None if data else OSError(errno.ECONNRESET, "it has hung up")


def _read(
    rank: int, world_size: int, answers: Mapping[bytes, bytes | OSError], path: Path
) -> RankPlace | None:
    """Return where a worker is by its answers; None of one that has made no process group."""
    traces = {handler: one for handler, one in answers.items() if isinstance(one, bytes)}
    errors = [one for one in answers.values() if isinstance(one, OSError)]
    if any(isinstance(error, FileNotFoundError) for error in errors):
        # It takes its socket away when its interpreter ends; its groups stay.
        return RankPlace(leaving=True) if groups_path(path).exists() else None
    for error in errors:
        if not (traces and isinstance(error, NoRecordError)):
            return RankPlace(problem=error.strerror or str(error))
    if not answers:
        return None
    try:
        noted = _text(groups_path(path))
        return place(rank, world_size, traces.get(TRACE, b"{}"), noted, traces.get(DEVICE_TRACE))
    except (OSError, ValueError, RecursionError) as error:
        return RankPlace(problem=f"what it answers is not read: {error}")


# ── waits ────────────────────────────────────────────────────────────────────────────────────────


class UnrecordedWait(NamedTuple):
    """A wait that torch does not record: its function, the process, and since when it is known.

    ``woken`` is how often the process's first thread has been woken in its life, ``at`` is a time
    of the monotonic clock.
    """

    name: str
    pid: int
    woken: int
    at: float

    def after(self, before: UnrecordedWait | None) -> UnrecordedWait:
        """Return this wait, or the one seen before, if it is the same."""
        if before is None or (before.name, before.pid) != (self.name, self.pid):
            return self
        # A group that is made takes some messages; there is not one after the other.
        same = self.name == "new_group" or self.woken - before.woken <= QUIET
        return before if same else self


class Waits:
    """Remembers the waits of a round; one thread's."""

    def __init__(self) -> None:
        self._unrecorded: Mapping[int, UnrecordedWait] = {}
        self._recorded: Mapping[tuple[int, CollectiveCall], float] = {}

    def note(self, places: Mapping[int, RankPlace]) -> None:
        """Take down since when each wait that torch records is known."""
        now, before = time.monotonic(), self._recorded
        waits = [(rank, one) for rank, place in places.items() for one in place.awaited]
        self._recorded = {each: before.get(each, now) for each in waits}

    def dated(self, places: Mapping[int, RankPlace]) -> dict[int, RankPlace]:
        """Return the places; a wait that was seen before it began has begun when it was seen."""
        first, ahead = self._recorded, time.time() - time.monotonic()

        def begun(rank: int, call: CollectiveCall) -> float:
            return min(call.at, first.get((rank, call), math.inf) + ahead)

        return {rank: at_times(place, partial(begun, rank)) for rank, place in places.items()}

    def seen(
        self, places: Mapping[int, RankPlace], dumps: Mapping[int, Dump], asked: Mapping[int, int]
    ) -> dict[int, RankPlace]:
        """Return the places with the waits that the stacks show of those that were ``asked``."""
        found = unrecorded(places, dumps, asked)
        now = {rank: one.after(self._unrecorded.get(rank)) for rank, one in found.items()}
        others = {k: one for k, one in self._unrecorded.items() if k not in asked}
        self._unrecorded = {**others, **now}
        return awaiting(places, now)

    def known(
        self, places: Mapping[int, RankPlace], ranks: Collection[int]
    ) -> dict[int, RankPlace]:
        """Return the places with the waits that the stacks of these ranks have shown before."""
        return awaiting(places, {k: one for k, one in self._unrecorded.items() if k in ranks})


def awaiting(
    places: Mapping[int, RankPlace], waits: Mapping[int, UnrecordedWait]
) -> dict[int, RankPlace]:
    """Return the places; of a rank in no collective with the wait that its stack shows."""
    ahead = time.time() - time.monotonic()
    calls = {
        k: CollectiveCall(0, one.name, at=one.at + ahead, waits=True) for k, one in waits.items()
    }
    return {**places, **{k: replace(places[k], receives=(call,)) for k, call in calls.items()}}


def unrecorded(
    places: Mapping[int, RankPlace], dumps: Mapping[int, Dump], pids: Mapping[int, int]
) -> dict[int, UnrecordedWait]:
    """Return the waits that stacks show, of ranks in no collective.

    Others are left out, since to read the sources of lines takes milliseconds a rank.
    """
    found: dict[int, UnrecordedWait] = {}
    for rank, one in places.items():
        if rank not in dumps or one.is_held or one.problem:
            continue
        pid = pids[rank]
        if name := stackdump.wait_in(dumps[rank], partial(_line, pid)):
            # One that has not begun any collective has waited all the time.
            woken = proc.status(pid).get("voluntary_ctxt_switches", "") if one.done else "0"
            number = int(woken) if woken.isdigit() else -1
            found[rank] = UnrecordedWait(name, pid, number, time.monotonic())
    return found


def _line(pid: int, file: str, number: int) -> str:
    """Return a line of a source as the process finds it; "" without its source."""
    lines: list[str] = []
    source = Path(f"/proc/{pid}/cwd", file)
    with contextlib.suppress(OSError):
        atonce.within(SOURCE_S, lambda: lines.extend(_text(source).split("\n")), "source")
    return "".join(lines[number - 1 : number])


def _text(path: Path) -> str:
    with open_regular(path) as file:
        return os.fsdecode(file.read(LONGEST_GROUPS))
