"""The rows, pages and lines of the screen, and the one place that reads for them.

Rows are made for what is open only: of a closed node its ranks are counted. All methods of
:class:`TopReader` but ``log`` may take long, and are called in threads.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from elaunch.errors import ElaunchError
from elaunch.runs import verdict
from elaunch.runs.directory import RunDir, run_id_of
from elaunch.runs.job import BAD, JobDocument, JudgedNode, WorkerSeen
from elaunch.text import block, count, duration, moment, one_line, size
from elaunch.views import failures
from elaunch.views.agents import stacks_of
from elaunch.views.attention import attention
from elaunch.views.curves import MetricsReader
from elaunch.views.layout import Cell, Fields, Page, Paragraph, Table, Title, fields, styled
from elaunch.views.logs import Choice
from elaunch.views.logtail import Line, LogFilter, RunLogs, newer, search
from elaunch.views.page import run_page
from elaunch.views.read import RunReader, read

RECENT: Final = 8
SPARKS: Final = " ▁▂▃▄▅▆▇█"
MOST_SPARKS: Final = 80
LEVELS: Final = {"bad": ("✗", "bold red"), "warn": ("!", "yellow")}

Key = tuple[int, ...]
"""``()`` the job, ``(node,)`` a node, ``(node, rank)`` a rank."""
JOB: Key = ()

Lines = Callable[[str], tuple[bool, list[Text]]]
"""Takes a needle; returns whether the lines replace those before, and the lines."""


@dataclass(frozen=True)
class TreeRow:
    """One row; ``open`` is None where nothing is below it."""

    key: Key
    name: str
    state: str
    note: str
    level: int
    open: bool | None = None


def rows(
    job: JobDocument, found: Sequence[JudgedNode], opened: Collection[Key], needle: str = ""
) -> list[TreeRow]:
    """Return what the tree shows; with a ``needle`` the ranks in which it is, and their nodes."""
    wanted = needle.lower()
    level = 2 if job.state in BAD else max((node.level for node in found), default=0)
    first = TreeRow(JOB, one_line(job.run_id), job.state, "", level, JOB in opened)
    lines = [first]
    for node in found if JOB in opened or wanted else ():
        number, name = node.seen.number, f"node {node.seen.number} {one_line(node.seen.host)}"
        named = wanted in name.lower()
        ranks = [one for one in node.ranks if named or wanted in _searched(*one[1:])]
        if wanted and not (named or ranks):
            continue
        is_open = (number,) in opened or (bool(wanted) and not named)
        states = Counter(worker.state for _, _, worker in node.ranks if worker)
        ended = max(states, key=lambda one: (one in ("FAILED", "GONE"), states[one]), default="")
        note = count(len(node.ranks), "rank")
        lines.append(TreeRow((number,), name, ended, note, node.level, is_open))
        for worst, rank, worker in ranks if is_open else ():
            step = f"step {worker.step}" if worker and worker.step is not None else ""
            state = worker.state if worker else ""
            lines.append(TreeRow((number, rank), f"rank {rank}", state, step, worst))
    return [replace(first, note="no match")] if wanted and lines == [first] else lines


def _searched(rank: int, worker: WorkerSeen | None) -> str:
    return f"rank {rank} {worker.state if worker else ''}".lower()


@dataclass(frozen=True)
class TopReading:
    """One reading of a run; ``page`` is what ``elaunch status`` shows of it."""

    job: JobDocument
    nodes: list[JudgedNode]
    page: Page
    attention: list[dict[str, str]]
    pace: str
    recent: Sequence[Text]


def own_node(job: JobDocument) -> int:
    """Return the rank of this machine's node; 0 where it has none."""
    return (job.record and job.record.get("node_rank")) or 0


class TopReader:
    """Reads one run for ``elaunch top``."""

    def __init__(self, run: RunDir, environ: Mapping[str, str] = os.environ) -> None:
        self.name = run_id_of(run)
        self._run = run
        self._environ = environ
        self._reader = RunReader(run, screen=True)
        self._metrics = MetricsReader(run, environ)
        self._logs: dict[str, RunLogs] = {}

    def read(self, chosen: Key, opened: Collection[Key]) -> TopReading:
        """Read how the run stands, its workers on ``opened`` nodes, and the chosen one's lines."""
        job = self._reader.read({key[0] for key in (*opened, chosen) if key})
        page = run_page(job) if job.record else (Paragraph((one_line(job.reason or ""),)),)
        return TopReading(
            job=job,
            nodes=job.judged,
            page=tuple(part for part in page if not isinstance(part, Table)),
            attention=list(attention(job)),
            pace=self._reader.pace.text(job.state == "RUNNING"),
            recent=self.recent(chosen, job),
        )

    def recent(self, chosen: Key, job: JobDocument) -> list[Text]:
        """Return the newest lines of what is chosen, or why there are none."""
        try:
            found = search(*self._wanted(chosen, job, ""), most=RECENT)[0]["lines"]
        except (ElaunchError, OSError) as error:
            return [Text(one_line(str(error)), style="dim")]
        lines = [log_line(line) for line in found[-RECENT:]] or [Text("none yet", style="dim")]
        for text in lines:
            text.no_wrap, text.overflow = True, "ellipsis"
        return [Text("last lines", style="dim"), *lines]

    def _wanted(self, chosen: Key, job: JobDocument, needle: str) -> tuple[RunLogs, LogFilter]:
        # Without a choice the log of this node: those of others take a question to each agent.
        node = str(chosen[0] if chosen else own_node(job))
        logs = self._logs.setdefault(node, RunLogs(self._run, self._environ, node))
        ranks = frozenset(chosen[1:]) or None
        return logs, LogFilter(Choice(ranks=ranks), needle)

    def log(self, chosen: Key, job: JobDocument) -> Lines:
        """Return what reads the log of what is chosen: for a new needle all, then what comes."""
        known: str | None = None
        ends: dict[str, int] = {}
        held: dict[str, bytes] = {}

        def read(needle: str) -> tuple[bool, list[Text]]:
            nonlocal known, ends
            logs, wanted = self._wanted(chosen, job, needle)
            if needle == known:
                return False, [log_line(line) for line in newer(logs, wanted, ends, held)]
            found, ends = search(logs, wanted, seconds=2.0)  # nothing goes on from there
            known = needle
            held.clear()
            return True, [log_line(line) for line in found["lines"]]

        return read

    def stacks(self) -> list[Text]:
        """Return where all ranks are now."""
        return _lines("\n".join(stacks_of(self._run, ()).lines()))

    def why(self) -> list[Text]:
        """Return what ``elaunch why`` shows."""
        return _lines("\n".join(failures.lines(failures.read_cards(read(self._run)))))

    def metrics(self, rank: int | None, width: int) -> list[Text]:
        """Return each metric's last value, its curve in ``width`` columns, and its extent."""
        shown = []
        for one in self._metrics.overview()["metrics"]:
            name, ranks = (one["group"], one["name"]), None if rank is None else [rank]
            found = self._metrics.curves(name, "step", ranks, -math.inf, math.inf)
            points = sorted(p for curve in found for p in zip(curve["x"], curve["y"], strict=True))
            if points:
                shown.append(_metric_line(name, points, max(8, min(width, MOST_SPARKS))))
        return shown or [Text("The script has reported nothing (ctx.train.report_…).")]


def log_line(line: Line) -> Text:
    """Return one line of a log with its rank, stderr in another colour."""
    _, rank, stream, _, text = line
    shown = Text().append(f"[{rank}] ", "cyan")
    return shown.append(
        one_line(text.expandtabs()), style="yellow" if stream == "stderr" else "none"
    )


def _lines(text: str) -> list[Text]:
    return [Text(line) for line in block(text).expandtabs().split("\n")]


def fixed(lines: Callable[[], list[Text]]) -> Lines:
    """Return what reads lines of which there are few: all of them, each time."""

    def read(needle: str) -> tuple[bool, list[Text]]:
        wanted = needle.lower()
        return True, [line for line in lines() if wanted in line.plain.lower()]

    return read


def help_lines() -> list[Text]:
    """Return the help."""
    return _lines(Path(__file__).with_name("help.txt").read_text(encoding="utf-8"))


def header(reading: TopReading) -> Text:
    """Return the line above everything: which run, and when it was read."""
    job = reading.job
    text = Text(no_wrap=True, overflow="ellipsis").append("elaunch top", "bold")
    text.append(f"  read at {moment(job.read_at, time.time())}")
    if reading.pace:
        text.append(f"  {reading.pace}", "cyan")
    if (share := verdict.goodput(job.record or {})) is not None:
        text.append(f"  goodput {100 * share:.1f} %")
    return text


def detail(reading: TopReading, chosen: Key, width: int) -> RenderableType:
    """Return what is on the right for the job, a node or a rank."""
    parts = _chosen_page(reading, chosen) if chosen else reading.page
    first, rest = _halves(parts)
    shown: list[RenderableType] = [styled(first, width)]
    if not chosen or reading.attention:
        shown += ["", _attention(reading, width)]
    shown += ["", *reading.recent]
    if rest:
        shown += ["", styled(rest, width)]
    return Group(*shown)


def _halves(parts: Page) -> tuple[Page, Page]:
    """Return what stands above the lines and what below: of a job the fields are long."""
    at = next((i for i, part in enumerate(parts) if isinstance(part, Fields)), len(parts))
    return (parts, ()) if len(parts) - at < 2 else (parts[:at], parts[at:])


def _attention(reading: TopReading, width: int) -> RenderableType:
    """Return what needs attention: if nothing worse does, the first nodes that do not answer."""
    silent = [node.seen for node in reading.nodes if node.seen.note][:3]
    titles = [f"node {one.number} {one.host}: {one.note}" for one in silent]
    lines = []
    for item in reading.attention or [{"title": title} for title in titles]:
        mark, color = LEVELS[item.get("level", "warn")]
        lines.append(Text().append(f"{mark} ", color).append(one_line(item["title"]), "bold"))
        told = item.get("detail", "").splitlines()[:4]
        lines += [Text(f"  {one_line(line)[: 4 * width]}") for line in told]
    return Text("\n").join(lines) if lines else Text("nothing needs attention", style="green")


def _chosen_page(reading: TopReading, chosen: Key) -> Page:
    number = chosen[0]
    node = next((one for one in reading.nodes if one.seen.number == number), None)
    if node is None:
        return (Paragraph((f"node {number} is not in this round",)),)
    note, known = ("", node.seen.note), {rank: worker for _, rank, worker in node.ranks if worker}
    if len(chosen) == 1:
        facts = [("host", node.seen.host), ("ranks", str(len(node.ranks))), note]
        if known:
            used = [worker.usage for worker in known.values() if worker.usage]
            facts.append(("cpu", f"{sum(one.tree_cpu_percent for one in used):.0f} % of a core"))
            facts.append(("memory", size(sum(one.tree_rss for one in used))))
        return (Title(f"node {number}", Cell(""), ""), _told(facts))
    if (worker := known.get(chosen[1])) is None:
        text = f"node {number}: {node.seen.note or 'it has not been asked yet'}"
        return (Title(f"rank {chosen[1]}", Cell(""), ""), Paragraph((text,)))
    where = f"node {number}, local rank {worker.record['local_rank']}"
    title = Title(f"rank {chosen[1]}", Cell(worker.state, worker.state), where)
    return (title, _told((*_rank_facts(worker), note)))


def _told(facts: Iterable[tuple[str, str]]) -> Fields:
    return fields(fact for fact in facts if fact[1])


def _rank_facts(worker: WorkerSeen) -> Iterator[tuple[str, str]]:
    yield "ended", worker.record["exit"] or ""
    yield "step", "" if worker.step is None else str(worker.step)
    yield "last call", worker.doing
    yield "status", worker.progress["status"] if worker.progress else ""
    yield "silent for", "" if worker.silent_s is None else duration(worker.silent_s)
    if (used := worker.usage) is not None:
        yield "cpu", f"{used.cpu_percent:.0f} %, tree {used.tree_cpu_percent:.0f} %"
        yield "memory", f"{size(used.rss)}, tree {size(used.tree_rss)}"
        yield "threads", str(used.threads)
    yield "pid", str(worker.record["pid"] or "")


def _metric_line(name: tuple[str, str], points: Sequence[tuple[float, float]], width: int) -> Text:
    """Return a metric's line; ``points`` are in the order of their steps."""
    values = [value for _, value in points]
    line = Text().append(" ".join(map(one_line, name)).ljust(26), "bold")
    line.append(f" {values[-1]:>11.5g}  ").append(spark(values, width), "cyan")
    return line.append(f"  {min(values):.4g} to {max(values):.4g}, step {points[-1][0]:.0f}")


def spark(values: Sequence[float], width: int) -> str:
    """Return a curve of one line: the mean of each part of the values, from lowest to highest."""
    count = min(width, len(values))
    cuts = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    top = len(SPARKS) - 2
    return "".join(
        SPARKS[1 + round((m - low) / (high - low) * top) if high > low else 4] for m in means
    )
