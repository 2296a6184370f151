"""Whether a round may follow one that failed: the restarts that a job has, and when. Pure.

=============================  =================================================================
budget                         a restart is possible while
=============================  =================================================================
``--max-restarts N``           fewer than N rounds in a row ended without a newer checkpoint
the same, for life             fewer than N rounds have failed in all
``--max-same-failures K``      fewer than K rounds in a row failed for one cause, without progress
always                         fewer than MOST_LOSSES in a row lost one node, without progress
=============================  =================================================================

A backoff is for a crash loop only: for a round that failed within LONG_ENOUGH of its start, without
a newer checkpoint, when the one before did so, too. Each such round in a row waits twice as long,
up to BACKOFF_MOST; any other restart is at once. A lost or a joined node costs no restart; where
one node is lost in round after round, the next round waits as after a failure.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from elaunch.rendezvous.decide.view import Rules
from elaunch.rendezvous.plan import SameFailure, Survivors

BACKOFF_FIRST: Final = 0.5
BACKOFF_MOST: Final = 30.0
LONG_ENOUGH: Final = 10.0
"""Seconds after which a round has not died at its start: much longer than a start takes, and a loop
of such rounds loads nobody."""
MOST_SAME: Final = 100
"""Failed rounds in a row that are kept; --max-same-failures is not more."""
LOSS_APART: Final = 600.0
"""Seconds of a round after which the loss of a node does not count: a job whose own checkpoints
elaunch does not see has made progress by then. For so long a round goes on without a node that was
UNSTABLE."""


class Spent(Struct, frozen=True):
    """The restarts that the job has used: in all, and since a newer checkpoint was seen.

    ``crashes`` are the rounds in a row, up to the last but one, that failed at their start.
    """

    restarts: int = 0
    without_progress: int = 0
    crashes: int = 0

    def refilled(self, before: int | None, found: int | None) -> Spent:
        """Return it after a search that ``found`` a step, where the round began ``before`` it."""
        if found is not None and found > (-1 if before is None else before):
            return replace(self, without_progress=0, crashes=0)
        return self

    def counted(self, lived_long: bool) -> Spent:
        """Return it with one more restart, after a round that ``lived_long`` or did not."""
        crashes = 0 if lived_long else self.crashes + 1
        return Spent(self.restarts + 1, self.without_progress + 1, crashes)


class Again(Struct, frozen=True):
    """Another round follows, after at most ``backoff`` seconds: the caller draws the jitter."""

    reason: str
    backoff: float = 0.0


class NoMore(Struct, frozen=True):
    """The job ends with this failure."""

    reason: str


def hopeless(rules: Rules, spent: Spent) -> bool:
    """Return whether no checkpoint can bring another round, so that none need be looked for."""
    if rules.max_restarts == 0:
        return True
    return rules.lifetime_budget and spent.restarts >= rules.max_restarts


def verdict(
    rules: Rules,
    spent: Spent,
    failure: str,
    step: int | None,
    lived_long: bool,
    survivors: Survivors = "",
) -> Again | NoMore:
    """Return whether another round follows ``failure``, and why.

    Args:
        rules: what the user allows.
        spent: what the job has used, refilled by the last search.
        failure: what happened: "rank 1 exited with code 7".
        step: of the checkpoint that the next round would resume from, if any.
        lived_long: whether the round that failed lasted LONG_ENOUGH.
        survivors: what workers of it do that stay for the next one, so that no step is lost:
            those that wait for it are not kept waiting.
    """
    used = spent.restarts if rules.lifetime_budget else spent.without_progress
    if used >= rules.max_restarts:
        return NoMore(failure + why_no_more(rules, spent))
    reason = f"{failure}; restart {used + 1} of {rules.max_restarts}"
    if not rules.lifetime_budget and rules.has_checkpoint_dir:
        reason += " since the last progress"
    if survivors:
        reason += ", the other workers go on"
    elif rules.has_checkpoint_dir:
        reason += f", {resumes_from(step)}"
    if spent.crashes == 0 or lived_long or survivors == "wait":
        return Again(reason)
    seconds = backoff(spent.crashes)
    wait = f"after a backoff of up to {seconds:g} s: it failed within {LONG_ENOUGH:g} s again"
    return Again(f"{reason}, {wait}", seconds)


def backoff(before: int) -> float:
    """Return the seconds to wait at most after a round that died as ``before`` did in a row."""
    return min(BACKOFF_MOST, BACKOFF_FIRST * 2.0 ** min(before - 1, 20)) if before else 0.0


def repeated(
    before: SameFailure | None, signature: str, round_number: int, progressed: bool
) -> SameFailure | None:
    """Return the rounds in a row that failed as this one did; None where that is not asked for.

    Args:
        before: those up to the failed round before.
        signature: of this failure.
        round_number: the round that failed.
        progressed: whether a newer checkpoint was found since.
    """
    if not signature:
        return None
    goes_on = before is not None and before.signature == signature and not progressed
    rounds = before.rounds if before is not None and goes_on else ()
    return SameFailure(signature, (*rounds, round_number)[-MOST_SAME:])


def resumes_from(step: int | None) -> str:
    """Return "from step 40" or "from the start"."""
    return "from the start" if step is None else f"from step {step}"


def why_no_more(rules: Rules, spent: Spent) -> str:
    """Return the end of the sentence in which a job ends: why no restart follows."""
    if rules.max_restarts == 0:
        return "; --max-restarts is 0"
    if rules.lifetime_budget:
        return f"; {rules.max_restarts} of {rules.max_restarts} restarts are used up"
    number = spent.without_progress
    restarts = "1 restart" if number == 1 else f"{number} restarts in a row"
    return f"; {restarts} brought no progress (--max-restarts)"
