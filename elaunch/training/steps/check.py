"""Micro-batches that two ranks compute, and whose bits are compared: ``steps(check=…)``.

About one leaf in a hundred is computed by its own rank, as any other, and once more by a second
one. All ranks draw them alike, from the seed and the step. Both ranks take a digest of the leaf's
loss and of its gradients as autograd gives them out; the ranks exchange the digests before a weight
changes.

Where two digests differ, the step's batches are given out again, and all ranks compute these
leaves. The majority of all digests, those of the first pass included, counts as right; ranks with
any other are named.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

import torch

from elaunch import text
from elaunch.training.steps.group import Group
from elaunch.training.steps.order import StepData
from elaunch.training.steps.tree import leaves_of

EVERY: Final = 100
"""Leaves of which one is compared."""


def drawn(data: StepData, seed: int, size: int) -> dict[int, list[int]]:
    """Return the leaves of a step that are compared, by ``size`` ranks.

    Each has all ranks but its own, in the order in which they are taken; one rank alone has itself.
    """
    random = Random(f"{seed} {data.number}")
    leaves = [leaf for leaf in range(data.leaves) if random.random() < 1 / EVERY]
    found = {}
    for leaf in leaves:
        own = next(rank for rank in range(size) if leaf in leaves_of(data.leaves, rank, size))
        others = [rank for rank in range(size) if rank != own] or [own]
        found[leaf] = random.sample(others, len(others))
    return found


class BitCheck:
    """The leaves of one step that are computed twice, and their digests; none if not ``on``.

    ``name`` is this rank's number in the job: those in the ``group`` change.
    """

    def __init__(
        self,
        data: StepData,
        seed: int,
        parameters: Sequence[torch.Tensor],
        on: bool,
        name: int,
        group: Group | None,
    ) -> None:
        self._parameters, self._name, self._group = parameters, name, group
        self._rank, size = (0, 1) if group is None else (group.rank, group.size)
        self._others = drawn(data, seed, size) if on else {}
        self._seconds = {leaf: ranks[:1] for leaf, ranks in self._others.items()}
        self._own: list[tuple[int, str]] = []
        self._earlier: dict[int, list[tuple[str, int, str]]] = {}

    def second(self) -> list[int]:
        """Return the leaves that this rank computes for the comparison alone."""
        return [leaf for leaf, ranks in self._seconds.items() if self._rank in ranks]

    def compute(self, leaf: int, loss: torch.Tensor, backward: Callable[[], None]) -> None:
        """Compute the gradients of a leaf by ``backward``; take the digest if it is compared."""
        if leaf not in self._seconds:
            backward()
            return
        found = [(-1, _digest(loss))]
        hooks = [
            one.register_hook(lambda gradient, n=n: found.append((n, _digest(gradient))))
            for n, one in enumerate(self._parameters)
            if one.requires_grad
        ]
        backward()
        for hook in hooks:
            hook.remove()
        self._own.append((leaf, hashlib.blake2b(repr(sorted(found)).encode()).hexdigest()))

    def differing(self) -> dict[int, str] | None:
        """Compare what all ranks have computed; ALL ranks call it together.

        Returns who is wrong, in words, for each leaf whose bits differ; None, the first time, where
        some do: then all ranks are to compute these once more.
        """
        if not self._others:
            return {}
        content = json.dumps([self._name, socket.gethostname(), self._own]).encode()
        everyone = [content] if self._group is None else self._group.allgather(content)
        computed, first_time = self._earlier, not self._earlier
        self._own, self._earlier = [], {}
        for name, host, digests in map(json.loads, everyone):
            for leaf, digest in digests:
                computed.setdefault(leaf, []).append((digest, name, host))
        differ = {leaf: of for leaf, of in computed.items() if len({one for one, *_ in of}) > 1}
        if differ and first_time:
            self._earlier = differ
            self._seconds = {leaf: self._others[leaf] for leaf in differ}
            return None
        return {leaf: _judged(of) for leaf, of in differ.items()}


def _digest(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().to_dense().cpu().contiguous().flatten()
    return hashlib.blake2b(values.view(torch.uint8).numpy(), digest_size=8).digest()


def _judged(computed: Sequence[tuple[str, int, str]]) -> str:
    most, times = Counter(digest for digest, *_ in computed).most_common(1)[0]
    is_majority = 2 * times > len(computed)
    wrong = {(rank, host) for digest, rank, host in computed if not is_majority or digest != most}
    who = text.listed([f"rank {rank} (host {host})" for rank, host in sorted(wrong)])
    often = f"{len(computed) - times} of {len(computed)} times"
    if is_majority:
        return f"{who} computed other bits than the rest, {often}"
    return f"{who} computed different bits, and no majority says which are right"
