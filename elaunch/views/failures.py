"""Why a run's rounds have failed: what its agent has written of each, read again.

The reports are in the run directory (elaunch.agent.failure.reporter), so ``elaunch why`` shows the
same while the job runs, after it ended, and after its agent was killed. A file that is torn, or not
what it should be, is named with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elaunch.agent.failure import explain, report
from elaunch.checkpoint.storage import files
from elaunch.errors import CheckpointError, UsageError
from elaunch.runs.directory import RunDir
from elaunch.runs.job import JobDocument
from elaunch.text import block, duration, moment, one_line
from elaunch.views.attention import text_of
from elaunch.views.page import agent_note, explanation_of, failure_lines, parts_of
from elaunch.wire.control import LOGS_S

if TYPE_CHECKING:
    from elaunch.views.store import JobStore, StoreJob

SCHEMA: Final = 1
MAX_BYTES: Final = 16 << 20
SHOWN_ROUNDS: Final = 10


@dataclass(frozen=True)
class Card:
    """The report of one failed round: for programs, for people; ``problem``: why one is missing."""

    round: int
    document: dict[str, Any] | None = None
    text: str = ""
    problem: str = ""

    @property
    def line(self) -> str:
        """The round with its cause in one line."""
        found = self.document or {}
        code = f" ({found['code']})" if found.get("code") else ""
        told = found.get("headline") or found.get("summary") or self.problem
        return one_line(f"round {self.round}: {told}{code}"[:500])


@dataclass(frozen=True)
class RunCards:
    """How a run stands, the card that is asked for, and those of other rounds, newest first.

    ``began`` are rounds before which none failed on this node, with why each began: a node was
    lost, left or joined, or somebody asked for it.
    """

    job: JobDocument
    card: Card | None
    others: tuple[Card, ...]
    began: tuple[tuple[int, str], ...] = ()

    @property
    def elsewhere(self) -> dict[str, Any] | None:
        """The first failure of the job, if it was on another node and no later one is known."""
        found = self.job.record.get("job_failure") if self.job.record else None
        number = found.get("round") if found else None
        late = self.card and isinstance(number, int) and self.card.round > number
        return None if late else found

    @property
    def code(self) -> str:
        """The code of the cause in the catalogue; empty where none is known."""
        if self.card is not None and self.card.document is not None:
            return str(self.card.document.get("code") or "")
        record = self.job.record
        if record is None or self.elsewhere is not None or self.card is not None:
            return ""
        ended = explain.of_command(record["exit_code"] or 0, record["reason"] or "")
        return record.get("code") or ended

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data (docs/failure-json.md)."""
        job, card = self.job, self.card
        return {
            "schema": SCHEMA,
            "run_id": job.run_id,
            "dir": str(job.run.path),
            "state": job.state,
            "reason": job.reason,
            "exit_code": job.record["exit_code"] if job.record else None,
            "code": self.code or None,
            "read_at": job.read_at,
            "round": card.round if card else None,
            "card": card.document if card else None,
            "problem": card.problem or None if card else None,
            "job_failure": self.elsewhere,
            "others": [{"round": each.round, "line": each.line} for each in self.others],
            "began": [{"round": number, "reason": reason} for number, reason in self.began],
        }


def read_cards(job: JobDocument, number: int | None = None) -> RunCards:
    """Read why a run's newest failed round has failed, or its round ``number``.

    Raises OSError where the directory cannot be read, LookupError where that round has no report.
    """
    run, rounds = job.run, job.run.reports()
    kept = _in_record(job)
    if kept is not None and kept.round not in rounds:
        rounds = sorted([*rounds, kept.round], reverse=True)
    else:
        kept = None
    if number is not None and number not in rounds:
        raise LookupError(", ".join(map(str, rounds)))
    chosen = number if number is not None else next(iter(rounds), None)
    card = None if chosen is None else read_card(run, chosen)
    if kept is not None and kept.round == chosen:
        card = kept
    rest = [each for each in rounds if each != chosen][:SHOWN_ROUNDS]
    others = tuple(read_card(run, each) for each in rest)
    return RunCards(job, card, others, tuple(_began(job, rounds)))


def _in_record(job: JobDocument) -> Card | None:
    """Return what the record has of the last failure: a full disk may have taken no report."""
    found = job.record["failure"] if job.record else None
    number = found.get("round") if found else None
    if found is None or not isinstance(number, int):
        return None
    text = block("\n".join([str(found.get("headline") or ""), *failure_lines(found)]).strip())
    return Card(number, found, text, "its report is not there; this is what the record has of it")


def _began(job: JobDocument, failed: Collection[int]) -> Iterator[tuple[int, str]]:
    history = job.record["history"] if job.record else []
    others = [one for one in history if one["round"] and one["round"] - 1 not in failed]
    for one in others[: -SHOWN_ROUNDS - 1 : -1]:
        yield one["round"], one_line(one["reason"] or "")[:500]


def in_short(
    run: RunDir, known: dict[int, tuple[int, dict[str, Any]]]
) -> tuple[dict[str, Any], ...]:
    """Return the failed rounds in short, the newest first; ``known`` keeps what was read before.

    A report is read again when it was replaced.
    """
    try:
        rounds = run.reports()
    except OSError:
        return ()
    for number in rounds:
        try:
            changed = run.report(number, "json").stat().st_mtime_ns
        except OSError:
            changed = 0
        if number not in known or known[number][0] != changed:
            known[number] = changed, _short(read_card(run, number))
    return tuple(known[number][1] for number in rounds)


def _short(found: Card) -> dict[str, Any]:
    document = found.document or {}
    summary = text_of(document.get("summary"))
    return {
        "round": found.round,
        "summary": text_of(document.get("headline"))
        or text_of(document.get("culprit"))
        or summary
        or found.problem,
        "ended": summary,
        "message": text_of(parts_of(document.get("first")).get("message")),
        "explanation": text_of(explanation_of(document)),
        "code": text_of(document.get("code")),
        "host": text_of(document.get("host")),
        "at_step": document.get("at_step"),
        "steps_lost": document.get("steps_lost"),
        "hang": bool(document.get("hang")),
        "ranks": document.get("culprit_ranks") or [],
        "lines": list(failure_lines(document))[:5] if document else [],
    }


def read_card(run: RunDir, number: int) -> Card:
    """Read one round's report; whatever is in its files, this raises nothing.

    A link is not followed: the directory may be another user's, and lead to any file of ours.
    """
    problems, document, text = [], None, ""
    path = run.report(number, "json")
    try:
        document = files.parse_json(files.read_limited(path, MAX_BYTES, os.O_NOFOLLOW), path.name)
    except (CheckpointError, OSError) as error:
        problems.append(_problem(error, path.name))
    path = run.report(number, "txt")
    try:
        text = files.read_limited(path, MAX_BYTES, os.O_NOFOLLOW).decode(errors="replace")
    except (CheckpointError, OSError) as error:
        problems.append(_problem(error, path.name))
    return Card(number, document, _without_table(text), "; ".join(problems))


def _without_table(text: str) -> str:
    """Return a report without its table, for those who parse the log: it says nothing more."""
    before, table, _ = text.rpartition(f"\n{report.HEADING}")
    return block((before if table else text).rstrip())


def _problem(error: Exception, name: str) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return reason if name in reason else f"{name}: {reason}"


@dataclass(frozen=True)
class JobCard:
    """How a job in a store stands, and its newest failure report, as the agent of ``host`` has it.

    ``silent`` are nodes that have not answered, with why.
    """

    job: StoreJob
    card: Card | None = None
    host: str = ""
    silent: tuple[tuple[int, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able data (docs/failure-json.md)."""
        job, card = self.job, self.card
        return {
            "schema": SCHEMA,
            "run_id": job.run_id,
            "store": job.place,
            "state": job.state,
            "reason": job.reason,
            "read_at": job.read_at,
            "round": card.round if card else None,
            "host": self.host or None,
            "card": card.document if card else None,
            "silent": [{"node": node, "text": why} for node, why in self.silent],
        }

    def lines(self) -> Iterator[str]:
        """Yield what people read."""
        job = self.job
        yield one_line(f"{job.run_id}: {job.state}{job.reason and f': {job.reason}'}")
        source = f" and the agent of {self.host}" if self.host else ""
        yield one_line(f"(read at {moment(job.read_at, job.read_at)} from {job.place}{source})")
        yield ""
        if self.card is not None:
            yield self.card.text or f"The report of round {self.card.round} cannot be shown."
        elif not job.live:
            yield "Its agents are gone, and with them what they could tell: the reports are in the"
            yield "run directories of its nodes (elaunch why, there)."
        else:
            yield "No round has failed, as far as its agents have answered."
        yield from (one_line(f"no answer of node {node}: {why}") for node, why in self.silent)


def read_job(store: JobStore, number: int | None = None) -> JobCard:
    """Ask a job's agents why its newest failed round has failed, or its round ``number``.

    Raises UsageError where they have no report of that round, StoreError as ``JobStore.read``.
    """
    job = store.job
    if not job.live:
        return JobCard(job)
    answers = store.ask({"of": "report", "round": number}, 2 * LOGS_S)
    silent = tuple((node, str(one["error"])) for node, one in answers.items() if "error" in one)
    found = [one for one in answers.values() if isinstance(one.get("round"), int)]
    if not found and number is not None:
        raise UsageError(
            f"--round {number}: no agent of job {store.name} has a report of that round"
        )
    if not found:
        return JobCard(job, silent=silent)
    # The agent whose rank has failed first has the whole report, the others a text about it.
    best = max(found, key=lambda one: (one["round"], one.get("report") is not None))
    document = best.get("report")
    report_of = Card(
        best["round"],
        document if isinstance(document, dict) else None,
        _without_table(str(best.get("text") or "")),
    )
    return JobCard(job, report_of, str(best.get("host") or ""), silent)


def lines(found: RunCards) -> Iterator[str]:
    """Yield what people read: how the run stands, the card, the other failed rounds."""
    job, card = found.job, found.card
    why = f": {job.reason}" if job.reason else ""
    note = agent_note(job)
    yield one_line(f"{job.run_id}: {job.state}{note and f' {note}'}{why}")
    now, written = job.read_at, job.written_at
    age = "" if written is None else f", written {duration(max(0.0, now - written))} ago"
    yield f"(read at {moment(now, now)} from {job.run.path}{age})"
    yield ""
    if found.elsewhere is not None:
        yield "The first failure of the job was on another node:"
        yield block(
            str(found.elsewhere.get("text") or found.elsewhere.get("summary") or "")
        ).rstrip()
        yield ""
    if card is None:
        known = explain.CAUSES.get(found.code)
        yield (
            "No round has failed on this node." if known is None else explain.part(known).rstrip()
        )
    else:
        yield card.text or f"The report of round {card.round} cannot be shown."
        if card.problem:
            yield one_line(f"({card.problem})")
    if found.others:
        yield ""
        yield "Other failed rounds (--round N):"
        yield from (f"  {each.line}" for each in found.others)
    if found.began:
        yield ""
        yield "Rounds before which none failed on this node, and why each began:"
        yield from (f"  round {number}: {reason}" for number, reason in found.began)
