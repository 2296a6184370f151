"""Reads what torch has recorded of each worker's collectives (elaunch.wire.recorder).

All workers are asked at once, and by one deadline: a worker that is stopped, or whose answer is too
long or is no answer of torch's, costs nothing but itself.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from msgspec.structs import replace

from elaunch import atonce, proc
from elaunch.agent.hangs import stackdump, stacks
from elaunch.agent.hangs.collectives import CollectiveCall, RankPlace
from elaunch.agent.hangs.stackdump import Dump
from elaunch.agent.hangs.trace import at_times, place
from elaunch.agent.patience import bounded
from elaunch.agent.policy import events
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


class Question(NamedTuple):
    """A question to the worker of a rank; ``handler`` is torch's name for it."""

    rank: int
    handler: bytes


QUIET: Final = 2
"""So often the first thread of a process may have been woken that has waited all the time."""
SOURCE_S: Final = 0.1
"""Seconds for a file system to answer when the line at which a worker is is read."""
FIRST_LOOK_S: Final = 5.0
"""Seconds between looks at the stack of a worker that has a group and has entered no collective."""


class _Unrecorded(NamedTuple):
    """A wait that torch does not record: its function, the process, and since when it is known.

    ``woken`` is how often the process's first thread has been woken in its life, ``at`` is a time
    of the monotonic clock.
    """

    name: str
    pid: int
    woken: int
    at: float

    def after(self, before: _Unrecorded | None) -> _Unrecorded:
        """Return this wait, or the one seen before, if it is the same."""
        if before is None or (before.name, before.pid) != (self.name, self.pid):
            return self
        # A group that is made takes some messages; there is not one after the other.
        same = self.name == "new_group" or self.woken - before.woken <= QUIET
        return before if same else self


class Recorders:
    """Asks the workers of the round that runs; the loop reports them, any thread may ask.

    ``run_dir`` is where they answer. ``failed`` are ranks that have ended by themselves, and not
    with 0.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._noted = 0.0
        self._round: Round | None = None
        self._ended: frozenset[int] = frozenset()
        self.failed: frozenset[int] = frozenset()
        self._since: Mapping[int, _Unrecorded] = {}
        self._first: Mapping[tuple[int, CollectiveCall], float] = {}
        self._traces: tuple[bytes, ...] = (TRACE, DEVICE_TRACE)
        self._look_at = 0.0

    def begin(self, begun: Round) -> None:
        """Forget the round before, and remove what its workers have left."""
        self.close()
        with self._lock:
            self._ended, self._round, self._since, self._look_at = frozenset(), begun, {}, 0.0
            self.failed = frozenset()

    def see(self, event: events.Event) -> None:
        """Take down which workers have ended with 0, and which have failed."""
        if not isinstance(event, events.Exit):
            return
        if event.exitcode == 0 and not event.stopped:
            self._ended |= {event.rank}
        elif event.exitcode > 0 or not event.stopped:
            self.failed |= {event.rank}

    def places(self, pids: Mapping[int, int], until: float) -> dict[int, RankPlace]:
        """Return where the living workers are, whose ``pids`` these are by rank, and the ended.

        It takes until the last has answered, or until ``until`` (monotonic seconds).
        """
        asked_at = time.monotonic()
        places = self._ask(pids, until, self._traces)()[0]
        self._note(places, asked_at)
        # The first collective of NCCL is not recorded before it has connected the ranks.
        new = [rank for rank, one in places.items() if one.groups and not (one.done or one.is_held)]
        unseen = {rank: pids[rank] for rank in new if rank in pids and DEVICE_TRACE in self._traces}
        with self._lock:
            is_due = bool(unseen) and time.monotonic() >= self._look_at
            self._look_at = time.monotonic() + FIRST_LOOK_S if is_due else self._look_at
        if is_due:
            return self.with_receives(places, unseen, until)
        return _awaiting(places, {k: one for k, one in self._since.items() if k in unseen})

    def with_receives(
        self, places: Mapping[int, RankPlace], pids: Mapping[int, int], until: float
    ) -> dict[int, RankPlace]:
        """Return the places, with the waits for another rank that torch does not record.

        Those of gloo's sends and receives are such: the stack of a rank shows that it is in one.
        It waits since it was first seen there, if it has not been woken since: the next of many
        looks the same. All waits are as long as they were seen, also if the clock was set back.
        """
        outside = [
            rank for rank, one in places.items() if not (one.is_held or one.problem or one.leaving)
        ]
        asked = {rank: pids[rank] for rank in outside if rank in pids}
        dumps = self._ask(asked, until, (STACKS,))()[1]
        found = _unrecorded_waits(places, dumps, pids)
        with self._lock:
            seen = {rank: one.after(self._since.get(rank)) for rank, one in found.items()}
            self._since = {k: one for k, one in self._since.items() if k not in asked} | seen
        return _awaiting(self._dated(places), seen)

    def _note(self, places: Mapping[int, RankPlace], asked_at: float) -> None:
        """Keep since when each wait is known, by the monotonic clock.

        Several threads ask: places that were asked for before the newest ones tell nothing new.
        """
        waits = [(rank, one) for rank, place in places.items() for one in place.awaited]
        with self._lock:
            if asked_at >= self._noted:
                now, before, self._noted = time.monotonic(), self._first, asked_at
                self._first = {each: before.get(each, now) for each in waits}

    def _dated(self, places: Mapping[int, RankPlace]) -> dict[int, RankPlace]:
        """Return the places; a wait that was seen before it began has begun when it was seen."""
        first, ahead = self._first, time.time() - time.monotonic()

        def begun(rank: int, call: CollectiveCall) -> float:
            return min(call.at, first.get((rank, call), math.inf) + ahead)

        return {rank: at_times(place, partial(begun, rank)) for rank, place in places.items()}

    def scene(
        self, pids: Mapping[int, int], until: float, hurries: bool
    ) -> Callable[[], tuple[dict[int, RankPlace], dict[int, Dump]]]:
        """Ask the living workers; what is returned reads what they have answered.

        That is where they are, and the stacks of those that let Python go. If it ``hurries``,
        stacks are not waited for much longer than the rest takes.
        """
        read = self._ask(pids, until, (*self._traces, STACKS), hurries)

        def places() -> tuple[dict[int, RankPlace], dict[int, Dump]]:
            places, dumps = read()
            return _awaiting(places, _unrecorded_waits(places, dumps, pids)), dumps

        return places

    def dumps(self, pids: Mapping[int, int], until: float) -> dict[int, Dump]:
        """Return the stacks of those workers that let Python go, as :meth:`places` does."""
        return self._ask(pids, until, (STACKS,))()[1]

    def _ask(
        self,
        pids: Mapping[int, int],
        until: float,
        handlers: Sequence[bytes],
        hurries: bool = False,
    ) -> Callable[[], tuple[dict[int, RankPlace], dict[int, Dump]]]:
        """Ask them; what is returned takes their answers apart."""
        ended = {rank: RankPlace(ended=True) for rank in self._ended - pids.keys()}
        begun = self._round
        if begun is None:
            return lambda: (ended, {})
        paths = {Question(rank, one): self._path(begun, rank) for rank in pids for one in handlers}
        answers: dict[int, dict[bytes, bytes | OSError]] = {rank: {} for rank in pids}
        for question, answer in ask(paths, until, hurries).items():
            answers[question.rank][question.handler] = answer
        if any(isinstance(one.get(DEVICE_TRACE), NoRecordError) for one in answers.values()):
            self._traces = (TRACE,)  # all workers have one torch
        silent = (rank for rank, one in answers.items() if any(map(_is_silence, one.values())))
        rests = {rank: stacks.at_rest(pids[rank]) for rank in silent}
        return partial(self._taken_apart, begun, ended, answers, rests)

    def _taken_apart(
        self,
        begun: Round,
        ended: Mapping[int, RankPlace],
        answers: Mapping[int, dict[bytes, bytes | OSError]],
        rests: Mapping[int, str],
    ) -> tuple[dict[int, RankPlace], dict[int, Dump]]:
        """Return where those are that have answered, and their stacks; some rest (at_rest)."""
        places, dumps = dict(ended), dict[int, Dump]()
        for rank, by_handler in answers.items():
            stack = by_handler.pop(STACKS, b"")
            text = "" if isinstance(stack, OSError) else stack.decode("utf-8", "replace")
            dump = stackdump.parse(text)
            dumps |= {} if dump is None else {rank: dump}
            found = _read(rank, begun.place.world_size, by_handler, self._path(begun, rank))
            if found is not None:
                why = rests.get(rank, "") if found.problem else ""
                places[rank] = replace(found, problem=why, stopped=True) if why else found
        return places, dumps

    def close(self) -> None:
        """Remove the sockets of the round; nobody can remove them for a worker that was killed."""
        if self._round is not None:
            remove = partial(self._remove, self._round)
            what = f"cannot remove the workers' sockets in {self._run_dir}"
            bounded(remove, None, what, self._run_dir)

    def _remove(self, begun: Round) -> None:
        for path in [self._path(begun, rank) for rank in begun.own_ranks]:
            path.unlink(missing_ok=True)
            groups_path(path).unlink(missing_ok=True)

    def _path(self, begun: Round, rank: int) -> Path:
        return socket_path(self._run_dir, begun.round, rank - begun.first_rank)


class NoRecordError(OSError):
    """A worker answers that its torch has no such record."""


def _is_silence(answer: bytes | OSError) -> bool:
    """Whether somebody who is there does not answer, not even that there is no such record."""
    return isinstance(answer, OSError) and not isinstance(answer, NoRecordError | FileNotFoundError)


def ask(
    questions: Mapping[Question, Path], until: float, hurries: bool = False
) -> dict[Question, bytes | OSError]:
    """Return what each worker answers until then, or why it does not.

    A stack may wait for Python's lock; if it ``hurries``, only for as long as the other answers
    took, and STACKS_S at least.
    """
    answers: dict[Question, bytes | OSError] = {}
    began = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for question, path in questions.items():
            try:
                connection = _send(path, question.handler)
            except OSError as error:
                answers[question] = error
            else:
                selector.register(connection, selectors.EVENT_READ, (question, bytearray()))
        while selector.get_map():
            ready = selector.select(max(0.0, until - time.monotonic()))
            keys = [key for key, _ in ready] or list(selector.get_map().values())
            answers |= _taken(selector, keys, late=not ready)
            if hurries and not any(_is_quick(key) for key in selector.get_map().values()):
                now, hurries = time.monotonic(), False
                until = min(until, now + max(STACKS_S, now - began))
    return answers


def _is_quick(key: selectors.SelectorKey) -> bool:
    """Whether a question that is not answered yet needs no lock of Python's."""
    question: Question = key.data[0]
    return question.handler != STACKS


def _taken(
    selector: selectors.BaseSelector, keys: Sequence[selectors.SelectorKey], late: bool
) -> dict[Question, bytes | OSError]:
    """Return which of these connections have answered, or are given up, and close them."""
    answers: dict[Question, bytes | OSError] = {}
    for key in keys:
        question, received = key.data
        timeout = TimeoutError(errno.ETIMEDOUT, "no answer")
        found = timeout if late else _receive(key.fileobj, received)
        if found is not None:
            answers[question] = found
            selector.unregister(key.fileobj)
            _close(key.fileobj)
    return answers


def _send(path: Path, handler: bytes) -> socket.socket:
    """Return a connection on which the question is asked; nothing here waits for the other side."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with short_address(path) as address:
            connection.connect(address)
        connection.send(_REQUEST % handler)
    except OSError:
        connection.close()
        raise
    return connection


def _receive(connection: object, received: bytearray) -> bytes | OSError | None:
    """Take what has come; return the answer's body when it is whole, or what is wrong with it."""
    assert isinstance(connection, socket.socket)
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


def _close(connection: object) -> None:
    assert isinstance(connection, socket.socket)
    connection.close()


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


def _awaiting(
    places: Mapping[int, RankPlace], waits: Mapping[int, _Unrecorded]
) -> dict[int, RankPlace]:
    """Return the places; of a rank in no collective with the wait that its stack shows."""
    ahead = time.time() - time.monotonic()
    calls = {
        k: CollectiveCall(0, one.name, at=one.at + ahead, waits=True) for k, one in waits.items()
    }
    return {**places, **{k: replace(places[k], receives=(call,)) for k, call in calls.items()}}


def _unrecorded_waits(
    places: Mapping[int, RankPlace], dumps: Mapping[int, Dump], pids: Mapping[int, int]
) -> dict[int, _Unrecorded]:
    """Return the waits that stacks show, of ranks in no collective.

    Others are left out, since to read the sources of lines takes milliseconds a rank.
    """
    outside = [rank for rank, one in places.items() if not (one.is_held or one.problem)]
    waits = {
        rank: _unrecorded(pids[rank], dumps[rank], places[rank].done > 0)
        for rank in outside
        if rank in dumps
    }
    return {rank: one for rank, one in waits.items() if one is not None}


def _unrecorded(pid: int, dump: Dump, begun: bool) -> _Unrecorded | None:
    """Return the wait for another rank that the stack of a process shows, if it does.

    One that has not ``begun`` any collective has waited all the time, however often it was woken.
    """
    name = stackdump.wait_in(dump, partial(_line, pid))
    if not name:
        return None
    woken = proc.status(pid).get("voluntary_ctxt_switches", "") if begun else "0"
    return _Unrecorded(name, pid, int(woken) if woken.isdigit() else -1, time.monotonic())


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
