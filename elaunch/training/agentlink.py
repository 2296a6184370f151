"""The worker's end of its one connection to its agent (protocol: elaunch.wire.worker).

A script never fails for the sake of its agent: where none answers, where it refuses, or when it is
gone, that is logged once and the script goes on without. A link that broke is not opened again: an
agent that is gone takes its workers with it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from elaunch.training.launch import Placement
from elaunch.wire import worker
from elaunch.wire.local import LONGEST, LocalChannel, Message, Received, Requester, connect
from elaunch.wire.progress import ProgressPage
from elaunch.wire.worker import AT_ONCE

SEND_TIMEOUT_S: Final = 2.0
JOIN_S: Final = 2.0

log = logging.getLogger("elaunch")


class Entry(NamedTuple):
    """An order to go on in another round.

    ``environ`` has its variables, ``present`` the ranks that go on, in order, and ``slots`` the
    number of ranks of each node.
    """

    environ: Mapping[str, str]
    present: tuple[int, ...]
    slots: tuple[int, ...]


class AgentLink:
    """A connection to this node's agent, from :meth:`start` to :meth:`close`; ``name``: the run's.

    ``on_notice``, to be set before start, is called with (reason, kind, grace, stated) in the
    link's thread when the agent asks for the job's end; it must return at once, as ``on_over``,
    which gets what the agent sends when a save is over, and ``on_entry``, which is called before
    an entry can be taken (:meth:`take_entry`). All methods may be called from any thread,
    and raise nothing but :meth:`ask` and :meth:`post`; they block only if the agent is frozen, and
    then for a few seconds. ``problem`` is why there is no agent any more, or "";
    ``refusal`` is the agent's own reason, where it has refused this worker.
    """

    def __init__(
        self, socket_path: Path, page: ProgressPage, placement: Placement, name: str | None = None
    ) -> None:
        self.on_notice: Callable[[str, worker.Kind, float | None, bool], None] | None = None
        self.on_over: Callable[[Message], None] = lambda _: None
        self.on_entry: Callable[[], None] = lambda: None
        self.local_rank = placement.local_rank
        self._path = socket_path
        self._page = page
        self._first: Message = {
            "op": "worker",
            "wire": worker.WIRE,
            "round": placement.round,
            "local_rank": placement.local_rank,
        }
        if name is not None:
            self._first["name"] = name
        self.problem = ""
        self.refusal = ""
        self._channel: LocalChannel | None = None
        self._requester: Requester | None = None
        self._pid = 0
        self._ended = False
        self._entry: Entry | None = None
        self._is_coming = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="elaunch-agent", daemon=True)

    def start(self) -> None:
        """Connect, send the progress page, and listen in a thread of its own."""
        self._pid = os.getpid()
        try:
            channel = LocalChannel(connect(self._path, SEND_TIMEOUT_S), LONGEST, AT_ONCE)
        except OSError as error:
            why = error.strerror or error
            self._give_up(f"cannot be reached at {self._path} ({why})", f"{self._path}: {why}")
            return
        self._channel, self._requester = channel, Requester(channel)
        self._send(self._first, [self._page.fd])
        self._thread.start()

    @property
    def has_entry(self) -> bool:
        """Whether an entry is to be taken, or is about to be."""
        return self._is_coming or self._entry is not None

    def take_entry(self, seconds: float) -> Entry | None:
        """Return the newest entry, None if none comes within ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self._entry is not None or self._ended, seconds)
            entry, self._entry = self._entry, None
        return entry

    def report_standing(self, stands: bool) -> None:
        """Report to the agent whether this rank goes on in its process if another dies."""
        self._send({"op": "stands", "stands": stands})

    def report_entered(self, round_number: int) -> None:
        """Report to the agent that this worker is of another round from here on."""
        self._send({"op": "entered", "round": round_number})

    def report_listening(self, shielded: bool) -> None:
        """Report to the agent that the script asks should_preempt().

        ``shielded``: SIGTERM does nothing here any more.
        """
        self._send({"op": "listens", "shielded": shielded})

    def report_notice(self, notice: worker.Notice) -> None:
        """Report to the agent a notice that did not come from it."""
        self._send({"op": "knows", **worker.notice_to_json(notice)})

    def ack(self, reason: str, kind: worker.Kind) -> None:
        """Report to the agent that the script ends for ``reason``: exit code 0 is "preempted" now.

        The agent reads the message even if this process ends at once.
        """
        self._send({"op": "ack", "reason": reason, "kind": kind})

    def ask(self, op: str, seconds: float, **fields: object) -> Received:
        """Return the agent's answer to a request, and its descriptors, which are the caller's.

        Raises TimeoutError if there is none within ``seconds``, and another OSError if the agent is
        gone, or this process was forked from the worker.
        """
        requester = self._connected()
        try:
            return requester.ask({"op": op, **fields}, seconds)
        except ConnectionError:
            self._thread.join(JOIN_S)  # it reads why the agent has hung up
            raise

    def post(self, op: str, seconds: float, **fields: object) -> None:
        """Send a request that the agent does not answer; raises as :meth:`ask`.

        The agent reads it even if this process ends at once.
        """
        self._connected().post({"op": op, **fields}, seconds)

    def _connected(self) -> Requester:
        requester = self._requester
        if requester is None or self._ended or os.getpid() != self._pid:
            raise ConnectionError(self.problem or "the context is closed")
        return requester

    def close(self) -> None:
        """Detach and end the thread; in a forked process it does nothing."""
        if self._channel is None or os.getpid() != self._pid:
            return
        self._send({"op": "detach"})
        self._ended = True
        self._channel.shutdown()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_S)

    def _send(self, fields: Message, files: Sequence[int] = ()) -> None:
        channel = self._channel
        if channel is None or self._ended or os.getpid() != self._pid:
            return
        try:
            channel.send(fields, files, SEND_TIMEOUT_S)
        except OSError as error:
            frozen = isinstance(error, TimeoutError)
            self._give_up("does not read any more" if frozen else f"has gone ({error.strerror})")
            channel.shutdown()

    def _read(self) -> None:
        channel, requester = self._channel, self._requester
        if channel is None or requester is None:
            return
        try:
            requester.read(self._take)
            self._give_up("has closed the connection")
        except OSError as error:
            self._give_up(f"has gone ({error.strerror or error})")
        finally:
            channel.close()

    def _take(self, message: Message) -> None:
        if "error" in message:
            self.refusal = str(message["error"])
            self._give_up(f"refuses this worker: {self.refusal}")
        elif message.get("op") == "preempt" and self.on_notice is not None:
            kind = message.get("kind")
            self.on_notice(
                str(message.get("reason", "")),
                kind if kind in worker.KINDS else "stop",
                worker.seconds_of(message.get("grace")),
                message.get("stated") is True,
            )
        elif message.get("op") == "over":
            self.on_over(message)
        elif message.get("op") == "enter":
            environ, present = message["environ"], tuple(message["present"])
            entry = Entry(environ, present, tuple(message["slots"]))
            self._send({"op": "enters", "round": int(entry.environ["ELAUNCH_ROUND"])})
            self._is_coming = True  # nothing new is begun that on_entry() could miss
            self.on_entry()
            with self._changed:
                self._entry, self._is_coming = entry, False
                self._changed.notify_all()

    def _give_up(self, why: str, problem: str = "") -> None:
        if self._ended:
            return
        self._ended, self.problem = True, problem or f"it {why}"
        with self._changed:
            self._changed.notify_all()
        log.warning("this node's agent %s; the script goes on without it", why)
