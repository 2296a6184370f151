"""The agent's end of its workers' connections (elaunch.wire.worker): one for each worker.

The control socket hands a connection over when a worker attaches. One thread reads all of them: it
posts what workers report, and notices which of them are gone. A worker's numbered requests, which
may take long, are answered by a thread of that worker's own (elaunch.agent.saver.saver), which is
started with the first of them; so no report waits for a save. A notice is sent to every worker that
is attached, and to those of the same round that attach later. A worker that does not take its few
bytes, or sends what is no message, is dropped: it loses its connection, nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct, field

from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round
from elaunch.wire.local import LONGEST, LocalChannel, Message, Requests, close_files
from elaunch.wire.progress import PageReader, Reading
from elaunch.wire.worker import KINDS, WIRE, Notice, seconds_of

LONGEST_NAME: Final = 200
JOIN_S: Final = 2.0
MOST_POSTED: Final = 32
"""Different events that one worker may report in a round; more are dropped, as repeated ones are.
The loop would come to nothing else."""
NOTICE_S: Final = 0.5
"""Seconds for a worker to take a notice: its buffer is full, or another answer is on its way."""

log = logging.getLogger("elaunch")

Serve = Callable[[Requests], None]


class _Link(Struct):
    """One attached worker."""

    channel: LocalChannel
    round: int
    local_rank: int
    page: PageReader
    requests: Requests | None = None
    posted: set[events.Event] = field(default_factory=set)
    shielded: bool = False
    stands: bool = False


class WorkerLinks:
    """Owns the links of the workers of the round that runs, from :meth:`start` to :meth:`close`.

    ``serve`` answers a worker's requests to their end, in a thread of that worker's own.
    """

    def __init__(self, post: Callable[[events.Event], None], serve: Serve) -> None:
        self._post = post
        self._serve = serve
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}
        self._new: list[_Link] = []
        self._left: dict[int, Reading] = {}
        self._round = -1
        self._notice: Notice | None = None
        self._grace_until: float | None = None
        self._name = ""
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="worker links", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread.start()

    def close(self) -> None:
        """End the thread and drop all workers; idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake.send(b"\0")
        self._thread.join(JOIN_S)
        with self._lock:
            for link in list(self._links.values()):
                self._drop(link)
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def begin(self, begun: Round) -> None:
        """Forget the workers of the round before, but those that were kept."""
        with self._lock:
            self._round, self._notice, self._grace_until = begun.round, None, None
            for link in list(self._links.values()):
                if link.local_rank in begun.kept:
                    link.round = begun.round
                    link.posted.clear()
                else:
                    self._drop(link)
            self._left.clear()

    def enter(self, local_rank: int, environ: Mapping[str, str], begun: Round) -> None:
        """Have a worker that was kept enter the round that begins."""
        with self._lock:
            if (link := self._links.get(local_rank)) is not None:
                ranks = {"present": begun.present, "slots": begun.slots}
                self._send(link, {"op": "enter", "environ": environ, **ranks})

    def adopt(self, channel: LocalChannel, request: Message, files: list[int]) -> str:
        """Take over the connection of a worker that attaches; return why not, or "".

        Both ``channel`` and ``files`` belong to the links from now on.
        """
        problem = self._attach(channel, request, files)
        if problem:
            close_files(files)
            with contextlib.suppress(OSError):
                channel.send({"error": problem}, (), 0.0)
            channel.close()
        return problem

    def _attach(self, channel: LocalChannel, request: Message, files: list[int]) -> str:
        round_number, local_rank = request.get("round"), request.get("local_rank")
        if request.get("wire") != WIRE:
            return (
                f"it sends messages of version {request.get('wire')}, and the agent those of "
                f"version {WIRE}: run one version of elaunch"
            )
        if type(round_number) is not int or type(local_rank) is not int or local_rank < 0:
            return "worker needs the numbers 'round' and 'local_rank'"
        if len(files) != 1:
            return "worker needs the descriptor of a progress page"
        with self._lock:
            if round_number != self._round:
                return f"round {round_number} does not run here; it is round {self._round}"
            try:
                page = PageReader(files[0])
            except (OSError, ValueError) as error:
                return f"the descriptor is no progress page: {error}"
            files.clear()  # it is the page's
            channel.longest, channel.most_files = LONGEST, 0
            link = _Link(channel, round_number, local_rank, page)
            if local_rank in self._links:
                self._drop(self._links[local_rank])
            self._links[local_rank] = link
            self._new.append(link)
            self._send(link, {"op": "attached"})
            if request.get("name"):
                self._name = str(request["name"])[:LONGEST_NAME]
            if self._notice is not None:
                self._send(link, _preempt(self._notice, self._grace_until))
        self._wake.send(b"\0")
        return ""

    def notify(self, notice: Notice, grace: float | None = None) -> None:
        """Send ``notice`` to the workers of this round, those that attach later included.

        They are ended after ``grace`` seconds from now, if it is given.
        """
        with self._lock:
            self._notice = notice
            self._grace_until = None if grace is None else time.monotonic() + grace
            for link in list(self._links.values()):
                self._send(link, _preempt(notice, self._grace_until))

    def name(self) -> str:
        """Return the name that the script has given the run last; empty if it has given none."""
        with self._lock:
            return self._name

    def shielded(self) -> list[int]:
        """Return the local ranks of the workers in which SIGTERM does nothing."""
        with self._lock:
            return [rank for rank, link in self._links.items() if link.shielded]

    def readings(self) -> dict[int, Reading]:
        """Return what the attached workers report of their progress, by local rank."""
        with self._lock:
            return {rank: link.page.read() for rank, link in self._links.items()}

    def left(self) -> dict[int, Reading]:
        """Return the last readings of the workers of this round that are not attached any more."""
        with self._lock:
            return dict(self._left)

    # ── one link ─────────────────────────────────────────────────────────────────────────────────

    def _send(self, link: _Link, message: Message) -> None:
        try:
            link.channel.send(message, (), NOTICE_S)
        except OSError as error:
            log.debug("worker %d does not take a message: %s", link.local_rank, error)
            self._drop(link)

    def _drop(self, link: _Link) -> None:
        """Close a link; the page goes with it. The lock is held."""
        if self._links.get(link.local_rank) is not link:
            return
        del self._links[link.local_rank]
        with contextlib.suppress(KeyError):  # it is new
            self._selector.unregister(link.channel)
        if link.requests is not None:
            link.requests.end()
        link.channel.close()
        with contextlib.suppress(OSError):
            self._left[link.local_rank] = link.page.read()
        link.page.close()

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                self._register_new() if key.data is None else self._read(key.data)

    def _register_new(self) -> None:
        """Clear what has woken the thread, and read what new links have sent already."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        with self._lock:
            new, self._new = self._new, []
            new = [link for link in new if self._links.get(link.local_rank) is link]
            for link in new:
                self._selector.register(link.channel, selectors.EVENT_READ, link)
        for link in new:
            self._read(link)

    def _read(self, link: _Link) -> None:
        try:
            for message, _ in link.channel.drain():
                self._on_message(link, message)
        except (EOFError, OSError) as error:
            log.debug("worker %d is dropped: %s", link.local_rank, error)
            with self._lock:
                self._drop(link)

    def _on_message(self, link: _Link, message: Message) -> None:
        if "n" in message:
            self._request(link, message)
            return
        link.shielded = link.shielded or message.get("shielded") is True
        event = event_of(message, link.round, link.local_rank)
        if isinstance(event, str):
            log.debug("worker %d sends what cannot be event_of: %s", link.local_rank, event)
        elif isinstance(event, events.WorkerStands):
            if event.stands != link.stands:
                link.stands = event.stands
                self._post(event)
        elif event not in link.posted and len(link.posted) < MOST_POSTED:
            link.posted.add(event)
            self._post(event)

    def _request(self, link: _Link, message: Message) -> None:
        with self._lock:
            if self._links.get(link.local_rank) is not link:
                return  # nobody would end what is begun here
            requests = link.requests
            if requests is None:
                requests = link.requests = Requests(link.channel)
                name = f"requests {link.local_rank}"
                thread = threading.Thread(
                    target=self._serve, args=(requests,), name=name, daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    log.warning("worker %d cannot be served: %s", link.local_rank, error)
                    self._drop(link)
                    return
        requests.put(message)


def event_of(message: Message, round_number: int, local_rank: int) -> events.Event | str:
    """Return the event that a worker's message means, or what is wrong with it."""
    op = message.get("op")
    if op == "listens":
        return events.WorkerListens(round_number, local_rank)
    if op in ("stands", "detach"):
        return events.WorkerStands(round_number, local_rank, message.get("stands") is True)
    if op in ("enters", "entered"):
        entered = message.get("round")
        known = entered if type(entered) is int else -1
        return events.WorkerEnters(known, local_rank, op == "entered")
    if op in ("knows", "ack"):
        kind, reason = message.get("kind"), message.get("reason")
        if kind not in KINDS or not isinstance(reason, str):
            return f"{op} without reason and kind"
        notice = Notice(reason[:1000], kind, seconds_of(message.get("grace")))
        if op == "knows":
            return events.NoticeKnown(round_number, notice)
        return events.PreemptAcked(round_number, local_rank, notice)
    return f"unknown op {op!r}"


def _preempt(notice: Notice, until: float | None) -> Message:
    message: Message = {"op": "preempt", "reason": notice.reason, "kind": notice.kind}
    if until is not None:
        message["grace"] = round(max(0.0, until - time.monotonic()), 3)
        if notice.grace is not None:
            message["stated"] = True
    return message
