"""Which rank is guilty of a failed round, in one sentence, with which its card begins. Pure.

In this order:

============  ====================================================================================
evidence      what is said
============  ====================================================================================
a hang        what its collectives show (elaunch.agent.hangs.collectives); of a rank whose
              interpreter ends and never comes to its end, the exception that it has raised
differ        the collectives did: whoever fails of that first, both sides are named there
own           the first failure has a cause of its own: its line comes first, and nothing else
likelier      the first has what a victim has, and another rank failed for a cause of its own
absent        a rank's collective of elaunch's, or monitored_barrier, says which have not come
timeout       the first waited until its timeout: for whom, by the collectives
ended         the others have waited for a rank that has ended with 0
behind        they have waited for a rank for long, and none has just lost its connection
lost          the first lost its connection, and ranks had ended with 0: the fewer are named
============  ====================================================================================

What other ranks did when one failed is no proof: a rank that evaluates while another is killed for
memory has nothing to do with it. It counts only where the first has failed as a victim does.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from elaunch import text
from elaunch.agent.failure.ends import Failure, FailureReport, failed
from elaunch.agent.failure.explain import explain
from elaunch.agent.hangs.collectives import Culprit
from elaunch.agent.hangs.scene import Scene
from elaunch.agent.policy.events import HangSeen

_TIMEOUTS: Final = frozenset({"E-COLLECTIVE-TIMEOUT", "E-NCCL-TIMEOUT"})
CLOSED: Final = frozenset({"E-PEER-LOST", "E-CONNECTION"})
"""Causes of one that has lost a connection, to another rank or to something else."""
_ABSENT: Final = re.compile(
    r"\bRanks? (?P<ranks>\d+(?:, \d+)*) failed to pass monitoredBarrier"
    r"|\b(?P<call>\w+ #\d+): not all ranks came within \S+ s: (?P<told>.*)"
)
_TOLD: Final = re.compile(r"\brank (\d+) \(host ")


def of_hang(made: FailureReport, hang: HangSeen) -> Culprit:
    """Return who is guilty of a hang: who was named, or who has raised and never ends."""
    if hang.named:
        return Culprit(hang.ranks, hang.culprit)
    everyone = (made.first, *made.victims, *made.stopped)
    raised = (each for each in everyone if each.exit.rank in hang.leaving and _has_raised(each))
    return Culprit(tuple(sorted(each.exit.rank for each in raised)), hang.culprit)


def _has_raised(failure: Failure) -> bool:
    """Whether its last exception is no victim's; elaunch has ended it, which says nothing."""
    alone = failure.exit._replace(exitcode=1)
    found = explain(alone, "\n".join([failure.message, *failure.traceback]))
    return bool(failure.message) and not found.victim


def of_failure(made: FailureReport, ended: Collection[int], size: int) -> Culprit | None:
    """Return who is guilty of a failure; None where nothing but its own line says that.

    Args:
        made: the report so far.
        ended: ranks that had ended with 0 when the first failed.
        size: ranks of this node, and those that have ended on others; 0 where that is not known.
    """
    scene, first = made.scene, made.first
    seen = None if scene is None else scene.culprit
    if seen is not None and seen.kind == "differ":
        return seen
    if not first.explanation.victim:
        return None
    return (
        _likelier(made)
        or _absent(made)
        or _awaited(made, scene)
        or (seen if seen is not None and seen.lasting and _explains(seen, first) else None)
        or _lost(made, ended, size)
    )


def _likelier(made: FailureReport) -> Culprit | None:
    other = made.likelier
    return None if other is None else Culprit((other.exit.rank,), failed(other))


def _absent(made: FailureReport) -> Culprit | None:
    """Return whom a collective has named."""
    for failure in (made.first, *made.victims, *made.stopped):
        if found := _ABSENT.search("\n".join([failure.message, *failure.traceback])):
            named = _TOLD.findall(found["told"]) if found["call"] else found["ranks"].split(", ")
            ranks = tuple(sorted(map(int, named)))
            have = "has" if len(ranks) == 1 else "have"
            what, by = found["call"] or "monitored_barrier", f"as rank {failure.exit.rank} says"
            return Culprit(ranks, f"{text.ranks(ranks)} {have} not come to {what}, {by}")
    return None


def _awaited(made: FailureReport, scene: Scene | None) -> Culprit | None:
    """Return for whom ranks have waited until their timeout; who lost them next may come first."""
    codes = {one.explanation.code for one in (made.first, *made.victims)}
    if scene is None or not codes & _TIMEOUTS:
        return None
    known = (one for one in (scene.culprit, scene.awaited) if one is not None and one.ranks)
    return next(known, None)


def _explains(seen: Culprit, first: Failure) -> bool:
    """Whether the first may have failed of that: who stands still has closed no connection."""
    return seen.kind == "ended" or first.explanation.code not in CLOSED


def _has_lost(failure: Failure) -> bool:
    """Whether the last lines of a rank say that it has lost another, however it has ended."""
    return explain(failure.exit._replace(exitcode=1), "\n".join(failure.tail)).victim


def _lost(made: FailureReport, ended: Collection[int], size: int) -> Culprit | None:
    """Return who has ended with 0 while others went on, or who went on alone."""
    leaving = set(() if made.scene is None else made.scene.leaving)
    # One whose interpreter ended before it was signalled has come to its own end.
    done = (one for one in made.stopped if not (one.exit.exitcode or _has_lost(one)))
    ended = {*ended, *({one.exit.rank for one in done} & leaving)}
    if not ended or not size or made.code != "E-PEER-LOST":
        return None
    # Those that were stopped have failed as well if they had raised, or ended by themselves.
    failed_too = (one for one in made.stopped if one.exit.exitcode > 0 or one.message)
    lost = (made.first, *made.victims, *failed_too)
    waited = () if made.scene is None else (*made.scene.waiting, *made.scene.failed)
    went_on = sorted({*(one.exit.rank for one in lost), *waited})
    unsuccessful = [one.exit for one in (made.first, *made.victims, *made.stopped)]
    successful = size - len({one.rank for one in unsuccessful if one.exitcode})
    have, them = ("has", "it") if len(ended) == 1 else ("have", "them")
    gone = f"{text.ranks(sorted(ended))} {have} ended with 0"
    # One that was stopped as its interpreter ended may have been done, too.
    leaving -= {*went_on, *ended}
    if len(went_on) > successful + len(leaving):
        return Culprit(tuple(sorted(ended)), f"{gone}, and the others have lost {them}")
    have = "has" if len(went_on) == 1 else "have"
    if len(went_on) < successful:
        return Culprit(tuple(went_on), f"{text.ranks(went_on)} {have} gone on where {gone}")
    return Culprit((), f"{gone}, and {text.ranks(went_on)} {have} gone on")
