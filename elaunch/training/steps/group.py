"""The ranks' own process group: torch's classes for it are named here, and nowhere else.

It is beside torch's default group, and needs none. Its messages go from one rank to another and
carry a tag, so that several may be under way at once. They are received by tag; those of one tag in
the order in which they were sent.

A rank that waits for another one does not see that a third has died, and nothing of torch's wakes
it. Its own connections do, when they are shut down from another thread (:class:`Sockets`), most of
the time: gloo forgets a message of which it had written, or read, a part as its connection broke.
So it is a thread that waits for messages, and :meth:`Group.cut` has the caller wait no more.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Final, Protocol

import torch
import torch.distributed as dist

from elaunch.errors import ContextError, PeerLost
from elaunch.training.distributed import DistributedContext

CONNECT_S: Final = 10.0
"""Seconds for the ranks, which have just met, to reach the store again, and each other: gloo's wait
for one that has died since cannot be cut."""
_DIED: Final = "steps(): a rank has died"
_TEXTS: Final = 0
"""The tag of what :meth:`Group.allgather` sends; those of tensors are above it."""


class _Work(Protocol):
    """A message in torch's hands."""

    def wait(self, timeout: timedelta) -> object:
        """Block until it is sent, or received."""


class Message:
    """One message that is under way."""

    def __init__(self, work: _Work, name: int, patience: timedelta) -> None:
        self._work = work
        self._name = name
        self._patience = patience

    def wait(self) -> None:
        """Block until its tensor is sent, or received; PeerLost if the other rank is gone."""
        try:
            self._work.wait(self._patience)
        except RuntimeError as error:
            raise _lost(self._name, error) from error


class Group:
    """This rank's connections to the others; one thread uses it.

    ``names`` are the numbers in the job of all, in order, for errors that name them. Every call
    raises PeerLost when the other rank is lost, or takes longer than the timeout.
    """

    def __init__(
        self, store: dist.Store, rank: int, names: Sequence[int], patience: timedelta, key: str
    ) -> None:
        self.rank = rank
        self.size = size = len(names)
        self.names = names
        self.others: Sequence[int] = [(rank + n) % size for n in range(1, size)]
        """Each rank begins with the next one, so that not all send to one rank first."""
        self._place = {"rank": rank, "world_size": size, "timeout": patience}
        self._store = store
        self._patience = patience
        own, soon = dist.PrefixStore(key, store), min(patience, timedelta(seconds=CONNECT_S))
        self._backend = dist.ProcessGroupGloo(own, rank, size, soon)
        self._made_default = False
        self._is_lost = False
        self._awaited: SimpleQueue[Sequence[Message] | None] = SimpleQueue()
        self._answers: SimpleQueue[PeerLost | None] = SimpleQueue()
        queues = (self._awaited, self._answers)
        threading.Thread(target=_await, args=queues, name="elaunch-steps", daemon=True).start()

    def among(self, ranks: Sequence[int]) -> Group | None:
        """Return a group of some of these ranks; None for one. ALL of them call it together."""
        if len(ranks) == 1:
            return None
        try:
            names, key = [self.names[rank] for rank in ranks], f"among {ranks}"
            return Group(self._store, ranks.index(self.rank), names, self._patience, key)
        except RuntimeError as error:
            raise _unconnected(error) from error

    def provide_default(self) -> None:
        """Make torch's default group if the script has none: ``ctx.checkpoint.save`` needs it."""
        if dist.is_initialized():
            return
        try:
            store = dist.PrefixStore("default", self._store)
            dist.init_process_group("gloo", store=store, **self._place)
        except RuntimeError as error:
            raise _unconnected(error) from error
        self._made_default = True

    def wait(self, messages: Sequence[Message]) -> None:
        """Block until all of these are sent, or received; PeerLost if one is not, or after cut."""
        if self._is_lost:
            raise PeerLost(_DIED)
        self._awaited.put(messages)
        if (error := self._answers.get()) is not None:
            self._is_lost = True
            try:
                raise error
            finally:
                del error  # or this frame and the connections would be garbage of each other

    def cut(self) -> None:
        """Have nobody wait for messages any more; from any thread."""
        self._is_lost = True
        self._answers.put(PeerLost(_DIED))

    def close(self) -> None:
        """Use it no more; end the default group, if it was made here."""
        self._awaited.put(None)
        if self._made_default and dist.is_initialized():
            dist.destroy_process_group()

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Message:
        """Begin to send a contiguous tensor, which stays as it is until that is done."""
        name = self.names[rank]
        try:
            return Message(self._backend.send([tensor], rank, tag), name, self._patience)
        except RuntimeError as error:
            raise _lost(name, error) from error

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Message:
        """Begin to receive into a contiguous tensor, which is as large as what is sent."""
        name = self.names[rank]
        try:
            return Message(self._backend.recv([tensor], rank, tag), name, self._patience)
        except RuntimeError as error:
            raise _lost(name, error) from error

    def allgather(self, content: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in the order of the ranks; all of them call it."""
        content += b"\0"  # no message is empty
        length = torch.tensor([len(content)])
        lengths = self._exchange(length, [torch.empty_like(length) for _ in range(self.size)])
        found = self._exchange(
            torch.frombuffer(bytearray(content), dtype=torch.uint8),
            [torch.empty(int(one), dtype=torch.uint8) for one in lengths],
        )
        return [one.numpy().tobytes()[:-1] for one in found]

    def give(self, content: torch.Tensor, ranks: Sequence[int]) -> None:
        """Send bytes, of which there are some, to other ranks, each of which calls `take`."""
        length = torch.tensor([len(content)])
        messages = [self.send(length, rank, _TEXTS) for rank in ranks]
        self.wait(messages + [self.send(content, rank, _TEXTS) for rank in ranks])

    def take(self, rank: int) -> torch.Tensor:
        """Return the bytes that another rank gives."""
        length = torch.tensor([0])
        self.wait([self.receive(length, rank, _TEXTS)])
        content = torch.empty(int(length), dtype=torch.uint8)
        self.wait([self.receive(content, rank, _TEXTS)])
        return content

    def _exchange(self, own: torch.Tensor, found: list[torch.Tensor]) -> list[torch.Tensor]:
        messages = [self.receive(found[rank], rank, _TEXTS) for rank in self.others]
        self.wait(messages + [self.send(own, rank, _TEXTS) for rank in self.others])
        found[self.rank] = own
        return found


def _await(
    given: SimpleQueue[Sequence[Message] | None], answers: SimpleQueue[PeerLost | None]
) -> None:
    """Wait for messages, list by list, until None comes."""
    while (messages := given.get()) is not None:
        answers.put(_problem(messages))
        del messages  # which keep the connections open


def _problem(messages: Sequence[Message]) -> PeerLost | None:
    try:
        for message in messages:
            message.wait()
    except PeerLost as error:
        return error
    return None


def connect(distributed: DistributedContext, names: Sequence[int]) -> Group | None:
    """Connect this rank with all others; None for a job of one. ALL ranks call it together.

    ``names``: as for :class:`Group`. Raises PeerLost where they cannot be reached,
    CollectiveTimeout where their store does not answer, ContextError if torch was built without
    gloo.
    """
    if distributed.size == 1:
        return None
    if not dist.is_available() or not dist.is_gloo_available():
        raise ContextError("steps() needs gloo, and this torch was built without it")
    distributed.open()
    patience = timedelta(seconds=distributed.timeout)
    host, port = distributed.placement.store or ("", 0)
    # torch waits without end for a store that takes connections and says nothing.
    distributed.round_store.connect(time.monotonic() + CONNECT_S).close()
    try:
        store = dist.TCPStore(host, port, None, False, timedelta(seconds=CONNECT_S))
        store.set_timeout(patience)
        own = dist.PrefixStore(f"{distributed.round_store.prefix}steps", store)
        return Group(own, distributed.rank, names, patience, "own")
    except RuntimeError as error:
        raise _unconnected(error) from error


def has_default() -> bool:
    """Return whether the script has made a process group of its own."""
    return bool(dist.is_available() and dist.is_initialized())


class Sockets:
    """The TCP connections that this process makes from now on.

    They are those up to :meth:`finish`. Any thread may cut them.
    """

    def __init__(self) -> None:
        self._before = _sockets()
        self._made: frozenset[tuple[int, int]] | None = None

    def finish(self) -> None:
        """Leave out what is made later."""
        self._made = _sockets() - self._before

    def cut(self) -> None:
        """Shut them down: whoever waits for them gets an error."""
        for descriptor, inode in _sockets() - self._before if self._made is None else self._made:
            with suppress(OSError), ExitStack() as stack:
                own = os.dup(descriptor)
                stack.callback(os.close, own)  # it may be no socket any more
                one = socket.socket(fileno=own)
                stack.callback(one.detach)
                is_it = os.fstat(own).st_ino == inode
                is_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
                if is_it and is_tcp and one.getpeername():
                    one.shutdown(socket.SHUT_RDWR)


def _sockets() -> frozenset[tuple[int, int]]:
    """Return the open sockets of this process: descriptors and inodes."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":[")
            if kind == "socket":
                found.add((int(name), int(inode[:-1])))
    return frozenset(found)


def _unconnected(error: RuntimeError) -> PeerLost:
    return PeerLost(f"the ranks cannot connect for steps(): {_first_line(error)}")


def _lost(name: int, error: RuntimeError) -> PeerLost:
    return PeerLost(f"steps(): rank {name} is lost: {_first_line(error)}", (name,))


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
