"""The ranks' own process group: torch's classes for it are named here, and nowhere else.

It is beside torch's default group, and needs none. Its messages go from one rank to another and
carry a tag, so that several may be under way at once. They are received by tag; those of one tag in
the order in which they were sent.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, Protocol

import torch
import torch.distributed as dist

from elaunch.errors import ContextError, PeerLost
from elaunch.training.distributed import DistributedContext

_TEXTS: Final = 0
"""The tag of what :meth:`Group.allgather` sends; those of tensors are above it."""


class _Work(Protocol):
    """A message in torch's hands."""

    def wait(self) -> object:
        """Block until it is sent, or received."""


class Message:
    """One message that is under way."""

    def __init__(self, work: _Work, rank: int) -> None:
        self._work = work
        self._rank = rank

    def wait(self) -> None:
        """Block until its tensor is sent, or received; PeerLost if the other rank is gone."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _lost(self._rank, error) from error


class Group:
    """This rank's connections to the others; one thread uses it.

    Every call raises PeerLost when the other rank is lost, or takes longer than the timeout.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, patience: timedelta) -> None:
        self.rank = rank
        self.size = size
        self.others: Sequence[int] = [(rank + n) % size for n in range(1, size)]
        """Each rank begins with the next one, so that not all send to one rank first."""
        self._place = {"rank": rank, "world_size": size, "timeout": patience}
        self._store = store
        self._backend = dist.ProcessGroupGloo(dist.PrefixStore("own", store), rank, size, patience)
        self._made_default = False

    def provide_default(self) -> None:
        """Make torch's default group if the script has none: ``ctx.checkpoint.save`` needs it."""
        if not dist.is_initialized():
            store = dist.PrefixStore("default", self._store)
            dist.init_process_group("gloo", store=store, **self._place)
            self._made_default = True

    def close(self) -> None:
        """End the default group, if it was made here."""
        if self._made_default and dist.is_initialized():
            dist.destroy_process_group()

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Message:
        """Begin to send a contiguous tensor, which stays as it is until that is done."""
        try:
            return Message(self._backend.send([tensor], rank, tag), rank)
        except RuntimeError as error:
            raise _lost(rank, error) from error

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Message:
        """Begin to receive into a contiguous tensor, which is as large as what is sent."""
        try:
            return Message(self._backend.recv([tensor], rank, tag), rank)
        except RuntimeError as error:
            raise _lost(rank, error) from error

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

    def _exchange(self, own: torch.Tensor, found: list[torch.Tensor]) -> list[torch.Tensor]:
        messages = [self.receive(found[rank], rank, _TEXTS) for rank in self.others]
        messages += [self.send(own, rank, _TEXTS) for rank in self.others]
        for message in messages:
            message.wait()
        found[self.rank] = own
        return found


def connect(distributed: DistributedContext) -> Group | None:
    """Connect this rank with all others; None for a job of one. ALL ranks call it together.

    Raises PeerLost where they cannot be reached, ContextError if torch was built without gloo.
    """
    if distributed.size == 1:
        return None
    if not dist.is_available() or not dist.is_gloo_available():
        raise ContextError("steps() needs gloo, and this torch was built without it")
    name = distributed.broadcast(uuid.uuid4().hex)
    patience = timedelta(seconds=distributed.timeout)
    host, port = distributed.placement.store or ("", 0)
    try:
        store = dist.TCPStore(host, port, None, False, patience)
        own = dist.PrefixStore(f"elaunch/steps/{name}", store)
        return Group(own, distributed.rank, distributed.size, patience)
    except RuntimeError as error:
        raise PeerLost(f"the ranks cannot connect for steps(): {_first_line(error)}") from error


def _lost(rank: int, error: RuntimeError) -> PeerLost:
    return PeerLost(f"steps(): rank {rank} is lost: {_first_line(error)}", (rank,))


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
