"""A last look at the other workers when the first of a round has failed, before any is signalled.

Their answers are taken at once, and taken apart when the others are signalled already: each
millisecond in which they go on is one more to the restart.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Final

from elaunch.agent.hangs import recorders, scene
from elaunch.agent.hangs.collectives import RankPlace
from elaunch.agent.hangs.living import RanksElsewhere
from elaunch.agent.hangs.recorders import WorkerAnswers
from elaunch.agent.hangs.sample import Sampler
from elaunch.agent.hangs.scene import NOT_ASKED, Scene
from elaunch.agent.hangs.stackdump import Dump
from elaunch.agent.patience import bounded
from elaunch.endings import Exit

SCENE_S: Final = 0.05
"""Seconds for the others to answer, before they are signalled."""


class LastLook:
    """The others of a round, as they have been asked; :meth:`described` takes the answers apart."""

    def __init__(
        self,
        first: Exit,
        answers: WorkerAnswers,
        pids: Mapping[int, int],
        before: Mapping[int, RankPlace],
        others: RanksElsewhere | None,
    ) -> None:
        self._others = others
        self._round = first.round
        self._answers = answers
        self._pids = pids
        self._before = before
        self._at = time.time()
        self._read: tuple[dict[int, RankPlace], dict[int, Dump]] | None = None

    def read(self) -> None:
        """Take the answers of this node's workers apart, with lines of sources where they run."""
        places, dumps = self._answers.places(), self._answers.dumps()
        found = recorders.unrecorded(places, dumps, self._pids)
        self._read = recorders.awaiting(places, found), dumps

    def described(self, patience: float) -> Scene:
        """Return the scene; what other nodes still answer is waited for so many seconds."""
        others = self._others or RanksElsewhere()
        if self._others is not None:
            others.settled.wait(patience)
        if self._read is None:
            what, place = "cannot read what the other workers do", self._answers.run_dir
            bounded(self.read, None, what, place)
        places, dumps = self._read or ({}, {})
        found, gone = {**others.places, **places}, frozenset(others.failed)
        if not (found or gone):
            return NOT_ASKED
        before, at = self._before, self._at
        return scene.describe(self._round, found, dumps, before=before, now=at, failed=gone)


def ask(sampler: Sampler, first: Exit, lost: bool, is_victim: bool) -> LastLook | None:
    """Ask the others, before they are signalled, where they are; blocks SCENE_S at most.

    If the ``first`` is a victim, they have all of that; else what they do is only shown. Where it
    has ``lost`` a rank, that may be one of another node: these are asked, too.
    """
    take = partial(_ask, sampler, first, lost, is_victim)
    run_dir = sampler.recorders.run_dir
    return bounded(take, None, "cannot see where the other workers are", run_dir)


def _ask(sampler: Sampler, first: Exit, lost: bool, is_victim: bool) -> LastLook | None:
    until, living, asked = time.monotonic() + SCENE_S, sampler.workers.now, None
    if lost and sampler.others is not None and living.begun is not None:
        asked = sampler.others.ask(living.begun, waited=False)
    pids = {rank: pid for rank, pid in living.pids.items() if rank != first.rank}
    answers = sampler.recorders.both(living, pids, until, hurries=not is_victim)
    if answers is None:
        return None
    look = LastLook(first, answers, pids, sampler.waiting, asked)
    if asked is not None:
        asked.answered.wait(max(0.0, until - time.monotonic()))
    # The lines of a victim's peers are looked up where they run, while they do. What is only shown
    # is read when the others are signalled.
    if is_victim:
        look.read()
    return look
