"""Where a run's time went, in words: goodput, recoveries, the slowest rank, one piece of advice.

==============  ==================================================================================
class           seconds of a slot
==============  ==================================================================================
``start``       until its worker was forked, and from there to ``elaunch.init()``
``rendezvous``  between rounds: the newest checkpoint is looked for, a backoff runs, agents meet
``init``        in ``elaunch.init()``
``load``        in calls that read checkpoints
``first_step``  from ``elaunch.init()`` to the first step of a round that is reported
``train``       what is left of a round
``save``        in calls that save, and until saves are written out after a round
``wait``        in calls of all ranks, and when its worker has ended before others
``section``     in sections of the script, as for evaluation
``detect``      from a failure or the last progress until the agent knew of it
``kill``        from there until nothing of the round was left
``nodes``       without a round, since nodes are missing, or as a spare
``lost``        trained, and done again from an older checkpoint
==============  ==================================================================================
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, Final, cast

from elaunch.errors import CheckpointError, JoinTimeoutError, StoreError
from elaunch.runs.record import (
    JobTimingRecord,
    LatenessRecord,
    LateRecord,
    Record,
    SlowestRecord,
    TimingRecord,
    lasted,
)
from elaunch.text import count, duration, one_line

CLASSES: Final = {
    "start": "start",
    "rendezvous": "rendezvous",
    "init": "init",
    "load": "load",
    "first_step": "first step",
    "train": "train",
    "save": "save",
    "wait": "waiting for the slowest rank",
    "section": "sections",
    "detect": "detect",
    "kill": "kill",
    "nodes": "wait for nodes",
    "lost": "done again",
}
"""Every class of time, as it is shown."""
MOST: Final = 0.01
"""The share of the time for which saves may stop the training."""
EARLY_S: Final = 60.0
"""Seconds before its start in which a job is taken to have run without a failure."""
SHOWN: Final = 5
"""Classes that are named beside ``train``."""
LEAST: Final = 0.001
"""The share from which a class is named."""
WORTH: Final = 0.05
"""The share from which something is worth advice, and a slower rank is named."""
FAR: Final = 2.0
"""By so much the interval of saves differs from the best one, to be worth advice."""
BUSY: Final = 0.9
"""The share of the time from which a DataLoader's processes compute all of the time."""
WATCHED_S: Final = 20.0
"""Seconds of such processes, together, from which something is said of them."""
SILENT_S: Final = 60.0
"""Seconds that a run of one round may take without a verdict at its end."""
BY_REASON: Final = (CheckpointError.exit_code, StoreError.exit_code, JoinTimeoutError.exit_code)
"""Exit codes of ends for which no worker is to blame: the result has their reason."""
REMEDIES: Final = {
    "save": "save(block=False) writes while the training goes on",
    "detect": "a shorter --hang-timeout finds a hang sooner",
    "kill": "workers have --sibling-grace to end after a failure, else --shutdown-timeout",
    "nodes": "a lower MIN of --nnodes goes on with fewer, a spare node takes over at once",
}
"""Advice that makes a class of time smaller, where there is some for any script."""
UNKNOWN: Final = "not known: the script does not report its steps (ctx.train)"


def seconds_between(cost: float, failure_s: float) -> float:
    """Return the seconds from save to save that lose least time, within what saves may take.

    Young's formula: the saves take ``cost / seconds`` of the time, and each failure, one in
    ``failure_s``, half the seconds since the last save.
    """
    return max(math.sqrt(2 * cost * failure_s), cost / MOST)


def expected_failure(failures: int, seconds: float) -> float:
    """Return the mean seconds to the next failure of a job with ``failures`` in ``seconds``.

    The next one is counted as if it came now: a job that has just begun is expected to fail soon,
    one that has run for a day without a failure in a day.
    """
    return (seconds + EARLY_S) / (failures + 1)


def goodput(record: Mapping[str, Any]) -> float | None:
    """Return the share of the time that is kept as training, 0 to 1; None where nobody knows.

    A script that does not report its steps may have waited all the time that it ran.
    """
    timing = record.get("job_timing") or record.get("timing")
    if not timing or timing["wall_s"] <= 0 or timing.get("reports") != "steps":
        return None
    return float(timing["seconds"].get("train", 0.0) / timing["wall_s"])


def classes(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the classes of time by name, as they are shown of a record."""
    return CLASSES | ({} if goodput(record) is not None else {"train": "in the script"})


def facts(record: Record, *, current: bool = True) -> Iterator[tuple[str, str]]:
    """Yield names and values: goodput, recoveries, slowest rank, advice; nothing if none is known.

    What a record that is not ``current`` does not have may have come since: nothing is said of it.
    A record of a run without an agent has no timing. That of all nodes, at the end of a job, takes
    the place of this node's own.
    """
    timing, job, lateness = record.get("timing"), record.get("job_timing"), record.get("lateness")
    if timing is None or not timing["slots"] or timing["wall_s"] <= 0:
        return
    late = None if lateness is None else late_rank(lateness)
    before = timing["wall_s"] - record.get("lasted_s", timing["wall_s"])
    if job is not None:
        timing = cast("TimingRecord", timing | {k: one for k, one in job.items() if k in timing})
        late = job["late"]
    nodes = 1 if job is None else job["nodes"]
    alone = job is None and record.get("node_count", 1) > 1
    if current or timing["reports"] == "steps":
        of = " of this node alone" if alone else ""
        yield "goodput", _goodput(timing, goodput(record), nodes, of, before)
    yield "recoveries", _recoveries(record)
    if not current:
        return
    if late is None and timing["slowest"] is None and lateness is not None:
        yield "slowest rank", f"none; {late_text(last_rank(lateness))}"
    else:
        yield "slowest rank", _slowest(timing, late, nodes)
    if advice := _advice(record, timing, late):
        yield "advice", advice


def facts_of_job(job: JobTimingRecord) -> Iterator[tuple[str, str]]:
    """Yield names and values of a job that other nodes' records are not at hand of."""
    timing = cast("TimingRecord", job)
    if job["wall_s"] > 0:
        yield "goodput", _goodput(timing, goodput({"timing": job}), job["nodes"])
        if job["late"] is not None or job["slowest"] is not None:
            yield "slowest rank", _slowest(timing, job["late"], job["nodes"])


def late_rank(found: LatenessRecord) -> LateRecord | None:
    """Return the rank for which the others of its node wait, if there is one."""
    return None if found["slow"] is None else last_rank(found)


def last_rank(found: LatenessRecord) -> LateRecord:
    """Return the rank of a node that comes last most often."""
    first = found["ranks"][0]
    rest = {key: found[key] for key in ("collectives", "held", "seconds", "why")}
    return cast("LateRecord", {**first, **rest, "host": ""})


def late_text(late: LateRecord) -> str:
    """Return "rank 2 arrived last in 46 of 60 collectives, 21 ms behind; …"."""
    behind, waited = 1000 * late["behind_s"], round(100 * late["held"])
    on = f" on {one_line(late['host'])}" if late["host"] else ""
    text = (
        f"rank {late['rank']}{on} arrived last in {late['last']} of {late['collectives']} "
        f"collectives, {behind:.3g} ms behind; the others waited {waited} % of "
        f"{duration(late['seconds'])}"
    )
    return f"{text}; {one_line(late['why'])}" if late["why"] else text


def shown(record: Record) -> int:
    """Return how many lines of its verdict a run prints that has ended: its result, and advice.

    One that was short, of a single round and completed prints nothing, as torchrun does; one that
    was short and not completed its result.
    """
    if len(record["history"]) > 1 or _seconds(record) > SILENT_S:
        return 1 + ("advice" in dict(facts(record)))
    return int(record["state"] != "COMPLETED")


def _seconds(record: Record) -> float:
    return lasted(record, record["started_at"])


def lines(record: Record) -> list[str]:
    """Return the verdict on a run that has ended: result, advice if there is any, other facts."""
    used = record["restarts"]["used"]
    result = f"{record['state']} after {duration(_seconds(record))}, {count(used, 'restart')}"
    if record["state"] == "FAILED" and (why := _headline(record)):
        result += f": {why} (elaunch why {shlex.quote(record['run_id'])})"
    elif record["state"] == "STOPPED" and 0 < (record["exit_code"] or 0) <= 128:  # no signal's
        result += f": {one_line(record['reason'] or '')}"
    told = sorted(facts(record), key=lambda fact: fact[0] != "advice")
    return [f"result: {result}", *(f"{name}: {value}" for name, value in told)]


def _headline(record: Record) -> str:
    """Return which rank ended the last round and with what; else the reason of the end.

    A restart may have followed that failure, but for what BY_REASON has.
    """
    if record["exit_code"] in BY_REASON:
        return one_line(record["reason"] or "")
    elsewhere, own = record.get("job_failure"), record["failure"]
    if elsewhere and elsewhere.get("round") == record["round"]:
        first_line = str(elsewhere.get("text", "")).partition("\n")[0]
        return one_line(str(elsewhere.get("summary") or first_line))
    if own and own.get("round") == record["round"]:
        return one_line(str(own.get("headline") or own.get("summary") or ""))
    return one_line(record["reason"] or "")


def _goodput(
    timing: TimingRecord, share: float | None, nodes: int, of: str = "", before: float = 0.0
) -> str:
    if share is None:
        return UNKNOWN
    wall = timing["wall_s"]
    others = {name: s for name, s in timing["seconds"].items() if name != "train"}
    named = [
        f"{CLASSES.get(name, name)} {_percent(seconds / wall)}"
        for name, seconds in sorted(others.items(), key=lambda one: -one[1])
        if seconds >= LEAST * wall
    ][:SHOWN]
    slots = count(timing["slots"], "slot") + (f" of {count(nodes)}" if nodes > 1 else of)
    earlier = f" ({duration(before)} in earlier starts)" if before > WORTH * wall else ""
    text = f"{_percent(share)} of {duration(wall)}{earlier} on {slots} is train"
    return f"{text}; {', '.join(named)}" if named else text


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _recoveries(record: Record) -> str:
    known = sorted(r for one in record["history"] if (r := one["recovery_s"]) is not None)
    if not known:
        return "none is known here" if record["restarts"]["used"] else "none"
    if len(known) == 1:
        return f"1, {known[0]:.3f} s"
    return f"{len(known)}, median {median(known):.3f} s, longest {known[-1]:.3f} s"


def _slowest(timing: TimingRecord, late: LateRecord | None, nodes: int) -> str:
    """Return which rank is slow: by the collectives, by the steps, or by both."""
    found = timing["slowest"]
    if late is not None:
        text = late_text(late)
        if found is None or found["rank"] != late["rank"] or not _stands_out(found):
            return text
        return f"{text}; {_paced(found)}"
    if found is None:
        if timing["reports"] == "steps":
            return "not known: no two ranks of this node have reported more than 5 steps"
        return UNKNOWN
    if not _stands_out(found):
        return f"none; each rank spends {found['median_s']:.3g} s per step"
    whose = "this node's ranks" if nodes == 1 else f"the ranks of {count(nodes)}"
    return f"rank {found['rank']}: {_paced(found)} of {whose}, {found['median_s']:.3g} s"


def _stands_out(found: SlowestRecord) -> bool:
    return found["step_s"] > (1 + WORTH) * found["median_s"]


def _paced(found: SlowestRecord) -> str:
    above = _percent(found["step_s"] / found["median_s"] - 1) if found["median_s"] > 0 else "far"
    return f"{found['step_s']:.3g} s of its own for a step, {above} above the median"


def _advice(record: Record, timing: TimingRecord, late: LateRecord | None) -> str:
    """Return what to do about the time, or "": a run that its workers have failed needs a mend."""
    if record["state"] == "FAILED" and timing["failures"]:
        return ""
    return (
        _advice_on_saves(record, timing)
        or _advice_on_threads(timing)
        or _advice_on_loaders(timing)
        or _advice_on_rank(timing, late)
        or _advice_on_losses(timing)
    )


def _advice_on_saves(record: Record, timing: TimingRecord) -> str:
    """Return how often to save, where the interval is far from that and it costs something."""
    saves, seconds, failures = record.get("saves"), timing["seconds"], timing["failures"]
    commits = 0 if saves is None else saves["commits"]
    if not commits:
        if failures and record["checkpoint_dir"] is None:
            failed = count(failures, "failure")
            return (
                f"give --checkpoint-dir: {failed}, and no checkpoint that is known to resume from"
            )
        return ""
    cost = seconds["save"] / commits
    pace = (seconds["train"] + seconds["lost"] + seconds["save"]) / commits
    best = seconds_between(cost, expected_failure(failures, timing["wall_s"]))
    share = (seconds["save"] + seconds["lost"]) / timing["wall_s"]
    if cost <= 0 or share < WORTH or best / FAR <= pace <= best * FAR:
        return ""
    steps = f" ({max(1, round(best / timing['step_s']))} steps)" if timing["step_s"] else ""
    return (
        f"save every {duration(best)}{steps}, not every {duration(pace)}: a save stops the "
        f"training for {duration(cost)}, {count(failures, 'failure')} "
        f"in {duration(timing['wall_s'])}"
    )


def _advice_on_threads(timing: TimingRecord) -> str:
    threads = timing["spare_threads"]
    if threads < 2:
        return ""
    return f"try OMP_NUM_THREADS={threads}: each worker has 1 thread, and {threads} CPUs are there"


def _advice_on_loaders(timing: TimingRecord) -> str:
    """Return a number of DataLoader processes, where those that there are compute all the time."""
    found = timing["loaders"]
    if found is None or found["busy"] < BUSY or found["seconds"] < WATCHED_S:
        return ""
    processes = found["processes"]
    number = min(2 * processes, found["cpus"] - 1)
    if number <= processes:
        return ""
    return (
        f"try num_workers={number} in the DataLoader, not {processes}: its processes compute "
        f"{100 * found['busy']:.0f} % of the time, so the training waits for them, and "
        f"each worker has {found['cpus']} CPUs"
    )


def _advice_on_rank(timing: TimingRecord, late: LateRecord | None) -> str:
    """Return the rank that the others wait for, if no class of time takes more than that."""
    if late is None:
        return ""
    waited = late["held"] * late["seconds"]
    if waited < max(WORTH * timing["wall_s"], _largest_loss(timing)[1]):
        return ""
    share = _percent(waited / timing["wall_s"])
    return (
        f"rank {late['rank']} costs most: ranks wait for it {duration(waited)}, {share} of the time"
    )


def _largest_loss(timing: TimingRecord) -> tuple[str, float]:
    others = {name: s for name, s in timing["seconds"].items() if name != "train"}
    return max(others.items(), key=lambda one: one[1], default=("", 0.0))


def _advice_on_losses(timing: TimingRecord) -> str:
    (name, seconds), slow = _largest_loss(timing), timing["slowest"]
    if seconds < WORTH * timing["wall_s"]:
        return ""
    at = f"{CLASSES.get(name, name)} takes most: {duration(seconds)} of each slot"
    remedy = f"; {REMEDIES[name]}" if name in REMEDIES else ""
    if name == "wait" and slow is not None and _stands_out(slow):
        rank = slow["rank"]
        remedy = f", which is rank {rank}: `elaunch profile --rank {rank}` shows what it does"
    return f"{at}, {_percent(seconds / timing['wall_s'])}{remedy}"
