"""Points of a run that need a person's attention, for screens: the worst first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from elaunch.runs import verdict
from elaunch.runs.identity import SUSPENDED
from elaunch.runs.job import BAD, JobDocument
from elaunch.runs.record import Record
from elaunch.text import duration, ranks

MOST_TITLE: Final = 300
MOST_TEXT: Final = 2000
_AGENT: Final = {
    "silent": "The agent does not answer; this is what it wrote last.",
    "stopped": f"The {SUSPENDED.format(pid='PID')}.",
    "elsewhere": "The agent runs on another machine; this is what it wrote last.",
}


def _item(level: str, title: str, detail: str = "", page: str = "") -> dict[str, str]:
    return {"level": level, "title": title, "detail": detail, "page": page}


def attention(job: JobDocument) -> Iterator[dict[str, str]]:
    """Yield what needs attention; nothing where all is well."""
    record = job.record
    if record is None:
        why = job.reason or "nothing can be read"
        yield _item("bad", "The record of this run cannot be read", why)
        return
    live = record["ended_at"] is None and job.state not in BAD
    newest = job.failures[0] if job.failures else None
    current = newest is not None and newest["round"] == record["round"]
    if job.state in BAD:
        yield from _ended_badly(job, record, newest if current else None)
    if live:
        if job.agent in _AGENT:
            yield _item("warn", _AGENT[job.agent])
        if job.awaited is not None:
            yield _item("warn", job.awaited["text"], "", "stacks")
        yield from _standing_still(job, record)
        if (lateness := record.get("lateness")) and lateness["slow"] is not None:
            yield _item("warn", verdict.late_text(verdict.last_rank(lateness)))
    if newest is not None and (live or not current):
        title = f"Round {newest['round']} failed: {newest['summary']}"
        detail = newest["ended"] if newest["ended"] != newest["summary"] else ""
        told = (detail, newest["message"], newest["explanation"])
        yield _item("warn", title, "\n".join(filter(None, told)), "failures")
    if (saves := record.get("saves")) and saves["problem"]:
        yield _item("warn", "The last save came to nothing", saves["problem"], "checkpoints")
    if job.latest_note:
        yield _item("warn", "Checkpoints", job.latest_note, "checkpoints")


def _ended_badly(
    job: JobDocument, record: Record, failure: Mapping[str, Any] | None
) -> Iterator[dict[str, str]]:
    elsewhere, why = record.get("job_failure") or {}, job.reason or ""
    if failure is not None:
        title, message = failure["summary"], failure["message"].partition("\n")[0]
        if title == failure["ended"] and message:
            title = f"{title}: {message}"[:MOST_TITLE]
        _, found, rest = why.rpartition(failure["ended"])
        told = [failure["explanation"], rest.lstrip("); ") if found else rest, *failure["lines"]]
        more = "\n".join(dict.fromkeys(text for text in told if text and text not in title))
        yield _item("bad", title, more, "failures")
    elif elsewhere:
        title = text_of(elsewhere.get("summary")) or "The first failure was on another node"
        yield _item("bad", title, text_of(elsewhere.get("text")))
    else:
        yield _item("bad", why or f"The run is {job.state}")


def text_of(value: object) -> str:
    """Return a text of a report, of a long one its beginning; "" for what is none."""
    return value[:MOST_TEXT] if isinstance(value, str) else ""


def _standing_still(job: JobDocument, record: Record) -> Iterator[dict[str, str]]:
    """Yield ranks that are silent for long, or behind the others, while the run goes on."""
    if silent := job.silent:
        progress = record.get("progress")
        limit = (progress["limit_s"] if progress else None) or 0.0
        longest = max(silent, key=lambda worker: worker.silent_s or 0.0)
        yield _item(
            "bad",
            f"No progress of {ranks(worker.rank for worker in silent)} for "
            f"{duration(longest.silent_s or 0.0)}; it is a hang at {duration(limit)}",
            longest.doing and f"last call of rank {longest.rank}: {longest.doing}",
            "logs",
        )
    if behind := job.behind:
        first = min(worker.step or 0 for worker in behind)
        last = max(worker.step or 0 for worker in job.everyone)
        names = ranks(worker.rank for worker in behind)
        yield _item("warn", f"Behind: {names} at step {first} of {last}")
