"""The verdict on a failed round: who failed first and who is to blame. Pure, but for error files.

:func:`build` makes a :class:`FailureReport` from the exits of a round, in the order in which they
were noticed. Each worker that ended is one of

=========  =====================================================================================
first      the first that failed; its exit code becomes the command's
victims    failed by themselves afterwards, in order, most often because the first was gone
stopped    ended by elaunch after the first failed
=========  =====================================================================================

and those that had succeeded, which are left out. The culprit is named in one sentence, with which
the card begins. In this order:

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
from collections.abc import Iterable, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from elaunch import text
from elaunch.agent.failure import evidence, tracebacks
from elaunch.agent.failure.evidence import NOTHING_KNOWN, Evidence, Failure, Hang
from elaunch.agent.failure.explain import OF_COMMAND, explain
from elaunch.agent.hangs.collectives import Culprit
from elaunch.agent.hangs.scene import NOT_ASKED, Scene
from elaunch.agent.policy.turn import Round
from elaunch.endings import exit_code
from elaunch.errors import HangError
from elaunch.rendezvous.text import UNACCUSED
from elaunch.text import one_line, shortened

MAX_TRACEBACKS: Final = 1 << 20
"""Characters of tracebacks that a report has of all workers but the first."""
MAX_SIGNATURE: Final = 300
MAX_HEADLINE: Final = 300
SCHEMA: Final = 1
_NUMBER: Final = re.compile(r"0x[0-9a-f]+|\d+")
_TIMEOUTS: Final = frozenset({"E-COLLECTIVE-TIMEOUT", "E-NCCL-TIMEOUT"})
CLOSED: Final = frozenset({"E-PEER-LOST", "E-CONNECTION"})
"""Causes of one that has lost a connection, to another rank or to something else."""
_ABSENT: Final = re.compile(
    r"\bRanks? (?P<ranks>\d+(?:, \d+)*) failed to pass monitoredBarrier"
    r"|\b(?P<call>\w+ #\d+): not all ranks came within \S+ s: (?P<told>.*)"
)
_TOLD: Final = re.compile(r"\brank (\d+) \(host ")


class FailureReport(Struct, frozen=True):
    """Everything that is known of one failed round on this node.

    ``first`` is the worker that failed first, or, with a ``hang``, the one that stands still.
    ``culprit`` is who is guilty, where another thing than its own end shows that. ``follows`` is
    the round that follows, once it begins.
    """

    name: str
    host: str
    round: int
    first: Failure
    victims: tuple[Failure, ...]
    stopped: tuple[Failure, ...]
    known: Evidence = NOTHING_KNOWN
    culprit: Culprit | None = None
    follows: Round | None = None

    @property
    def everyone(self) -> tuple[Failure, ...]:
        """The workers that have not ended well by themselves."""
        return (self.first, *self.victims, *self.stopped)

    @property
    def hang(self) -> Hang | None:
        """The hang, if the round has ended by one."""
        return self.known.hang

    @property
    def scene(self) -> Scene:
        """Where the others were."""
        return self.known.scene

    @property
    def seconds_into_round(self) -> float | None:
        """How long the round had lasted, where its begin is known."""
        failed_at = self.first.at if self.hang is None else self.hang.at
        began = self.known.started_at
        return None if began is None else max(0.0, failed_at - began)

    @property
    def exit_code(self) -> int:
        """The exit code of the command if no restart follows."""
        return HangError.exit_code if self.hang else exit_code(self.first.exit.exitcode)

    @property
    def likelier(self) -> Failure | None:
        """The worker that failed for a reason of its own, where the first shows a victim's.

        One that was stopped counts if it had raised, and its interpreter ended, before.
        """
        if not self.first.explanation.victim:
            return None
        raised = (
            each for each in self.stopped if each.message and evidence.came_to_end(each, self.scene)
        )
        return next((each for each in (*self.victims, *raised) if each.explains), None)

    @property
    def guilty(self) -> Failure:
        """The worker of this node that is to blame: the culprit, or else the first to fail."""
        accused = self.culprit.ranks[:1] if self.culprit else ()
        return next((one for one in self.everyone if one.exit.rank in accused), self.first)

    @property
    def told(self) -> Failure:
        """The worker whose end says why: the guilty, or else the first to fail."""
        return self.guilty if self.guilty.explains else self.first

    @property
    def code(self) -> str:
        """The code of the cause in the catalogue; empty where none is known."""
        if self.hang is not None:
            return OF_COMMAND[HangError.exit_code].code
        return self.told.explanation.code

    @property
    def headline(self) -> str:
        """The rank that is to blame and what it failed with, in one sentence."""
        if self.hang is not None:
            return one_line(self.hang.seen.reason)
        said = self.culprit.sentence if self.culprit else ""
        return shortened(one_line(said or failed(self.told)), MAX_HEADLINE)

    @property
    def accused(self) -> str:
        """The culprit as reasons name it: "" where the first to fail is known to be the one."""
        if self.culprit is not None and self.culprit.sentence:
            return one_line(self.culprit.sentence)[:MAX_HEADLINE]
        return UNACCUSED if self.first.explanation.victim else ""

    @property
    def signature(self) -> str:
        """The failure's text without its numbers: equal where it comes again in another round."""
        end, told = self.told.exit.word, self.told.message
        if self.hang is not None:
            end, told = "hang", self.hang.seen.reason
        return one_line(f"{self.code} {end} {_NUMBER.sub('#', told)}")[:MAX_SIGNATURE]

    @property
    def steps_lost(self) -> int | None:
        """How many steps the next round does again, where that is known."""
        resumed = self.follows.resumes_from if self.follows else None
        at = self.known.at_step
        return None if resumed is None or at is None or at < resumed.step else at - resumed.step

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able data, schema 1 of docs/failure-json.md."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "host": self.host,
            "round": self.round,
            "headline": self.headline,
            "summary": summary(self),
            "exit_code": self.exit_code,
            "seconds_into_round": self.seconds_into_round,
            "noticed_monotonic": self.known.noticed_monotonic,
            "explanation": self.first.explanation.text or None,
            "likely_victim": self.first.explanation.victim,
            "likelier": self.likelier.exit.rank if self.likelier else None,
            "code": self.code or None,
            "culprit": self.culprit.sentence or None if self.culprit else None,
            "culprit_ranks": list(self.culprit.ranks) if self.culprit else [],
            "at_step": self.known.at_step,
            "steps_lost": self.steps_lost,
            "follows": self._follows(),
            "hang": self.hang.to_dict() if self.hang else None,
            "meanwhile": None if self.scene is NOT_ASKED else self.scene.to_dict(),
            "first": self.first.to_dict(),
            "victims": [failure.to_dict() for failure in self.victims],
            "stopped": [failure.to_dict() for failure in self.stopped],
        }

    def _follows(self) -> dict[str, Any] | None:
        if self.follows is None:
            return None
        resumed = self.follows.resumes_from
        return {
            "round": self.follows.round,
            "resumed_step": resumed.step if resumed else None,
            "checkpoint": str(resumed.path) if resumed else None,
        }


def build(
    name: str,
    host: str,
    round: int,
    ends: Sequence[Failure],
    first: int,
    known: Evidence = NOTHING_KNOWN,
) -> FailureReport:
    """Read the error files of a failed round and make its report.

    Args:
        name: the script's name, as in torchrun's title.
        host: this node's name.
        round: the round that failed.
        ends: of all its workers on this node, in the order noticed, with what they left.
        first: local_rank of the one that failed first; it is in ``ends``.
        known: of the round besides.
    """
    began_at = next(end.at for end in ends if end.exit.local_rank == first)
    failures = {
        end.exit.local_rank: evidence.examined(end, end.at - began_at, known)
        for end in ends
        if end.exit.exitcode != 0 or end.stopped or end.exit.local_rank == first
    }
    cause = failures.pop(first)
    others = _bounded(failures.values())
    victims = tuple(f for f in others if not f.stopped)
    stopped = tuple(sorted((f for f in others if f.stopped), key=lambda f: f.exit.rank))
    made = FailureReport(name, host, round, cause, victims, stopped, known)
    return replace(made, culprit=of_failure(made) if known.hang is None else of_hang(made))


def _bounded(failures: Iterable[Failure]) -> list[Failure]:
    """Return the failures; those that come late in a long report are without their tracebacks."""
    kept, size = [], 0
    for failure in failures:
        size += sum(map(len, failure.traceback))
        late = size > MAX_TRACEBACKS
        kept.append(replace(failure, traceback=(), traceback_from="") if late else failure)
    return kept


def failed(failure: Failure) -> str:
    """Return what a rank failed with, in one sentence."""
    known, end = failure.explanation, failure.exit.text
    if known.victim:
        return f"{end}, which a rank does whose peer was gone before"
    if failure.message:
        place = tracebacks.place_of(failure.traceback)
        where = f" at {place}" if place else ""
        error = failure.message.strip().partition("\n")[0]
        if known.code == "E-SAVE-CUT":  # of which torch says the position in its file
            error = known.cause.partition(": most often")[0].rstrip(".")
            error = error[0].lower() + error[1:]
        return f"rank {failure.exit.rank} failed{where}: {error}"
    cause = re.split(r"[:.] |\.$", known.text, maxsplit=1)[0]
    return f"{end}: {cause[0].lower()}{cause[1:]}" if cause else end


def summary(report: FailureReport) -> str:
    """Return one line like ``rank 1 exited with code 7``, for the log and as a restart's reason."""
    if report.hang is not None:
        return report.hang.seen.reason
    return report.first.exit.text


# ── who is guilty ────────────────────────────────────────────────────────────────────────────────


def of_hang(made: FailureReport) -> Culprit | None:
    """Return who is guilty of a hang: who was named, or who has raised and never ends."""
    if made.hang is None:
        return None
    hang = made.hang.seen
    if hang.named:
        return Culprit(hang.ranks, hang.culprit)
    leaving = (one for one in made.everyone if one.message and one.exit.rank in hang.leaving)
    raised = (one for one in leaving if not _is_victims(one, (one.message, *one.traceback)))
    return Culprit(tuple(sorted(one.exit.rank for one in raised)), hang.culprit)


def _is_victims(failure: Failure, lines: Sequence[str]) -> bool:
    """Whether such lines of a rank are what a victim writes, however it has ended."""
    return explain(failure.exit._replace(exitcode=1), "\n".join(lines)).victim


def of_failure(made: FailureReport) -> Culprit | None:
    """Return who is guilty of a failure; None where nothing but its own line says that."""
    first, seen = made.first, made.scene.culprit
    if seen is not None and seen.kind == "differ":
        return seen
    if not first.explanation.victim:
        return None
    if (other := made.likelier) is not None:
        return Culprit((other.exit.rank,), failed(other))
    if (found := _absent(made) or _awaited(made)) is not None:
        return found
    # Who stands still has closed no connection.
    explains = seen and (seen.kind == "ended" or first.explanation.code not in CLOSED)
    return seen if seen and seen.lasting and explains else _lost(made)


def _absent(made: FailureReport) -> Culprit | None:
    """Return whom a collective has named."""
    for failure in made.everyone:
        if found := _ABSENT.search("\n".join([failure.message, *failure.traceback])):
            named = _TOLD.findall(found["told"]) if found["call"] else found["ranks"].split(", ")
            ranks = tuple(sorted(map(int, named)))
            what, by = found["call"] or "monitored_barrier", f"as rank {failure.exit.rank} says"
            return Culprit(ranks, f"{text.ranks_do(ranks, 'have')} not come to {what}, {by}")
    return None


def _awaited(made: FailureReport) -> Culprit | None:
    """Return for whom ranks have waited until their timeout; who lost them next may come first."""
    codes = {one.explanation.code for one in (made.first, *made.victims)}
    known = (made.scene.culprit, made.scene.awaited) if codes & _TIMEOUTS else ()
    return next((one for one in known if one is not None and one.ranks), None)


def _lost(made: FailureReport) -> Culprit | None:
    """Return who has ended with 0 while others went on, or who went on alone."""
    size = made.known.size
    leaving = {*made.scene.leaving}
    # One whose interpreter ended before it was signalled has come to its own end.
    done = (f for f in made.stopped if not (f.exit.exitcode or _is_victims(f, f.tail)))
    ended = {*made.known.ended, *({f.exit.rank for f in done} & leaving)}
    if not ended or not size or made.code != "E-PEER-LOST":
        return None
    # Those that were stopped have failed as well if they had raised, or ended by themselves.
    failed_too = (one for one in made.stopped if one.exit.exitcode > 0 or one.message)
    lost = (made.first, *made.victims, *failed_too)
    went_on = {*(one.exit.rank for one in lost), *made.scene.waiting, *made.scene.failed}
    successful = size - len({one.exit.rank for one in made.everyone if one.exit.exitcode})
    gone = f"{text.ranks_do(ended, 'have')} ended with 0"
    # One that was stopped as its interpreter ended may have been done, too.
    leaving -= {*went_on, *ended}
    if len(went_on) > successful + len(leaving):
        them = "it" if len(ended) == 1 else "them"
        return Culprit(tuple(sorted(ended)), f"{gone}, and the others have lost {them}")
    others = f"{text.ranks_do(went_on, 'have')} gone on"
    if len(went_on) < successful:
        return Culprit(tuple(sorted(went_on)), f"{others} where {gone}")
    return Culprit((), f"{gone}, and {others}")
