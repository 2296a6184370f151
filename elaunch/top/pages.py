"""The pages beside the tree, as lines of text, and the one place that reads for them.

All methods of :class:`TopReader` but ``now`` may take long, and are called in threads.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from elaunch.errors import ElaunchError
from elaunch.runs import verdict
from elaunch.runs.directory import RunDir, run_id_of
from elaunch.runs.job import JobDocument, JudgedNode, WorkerSeen
from elaunch.text import block, duration, moment, one_line, size
from elaunch.top.tree import Key
from elaunch.views import failures
from elaunch.views.agents import stacks_of
from elaunch.views.attention import attention
from elaunch.views.curves import MetricsReader
from elaunch.views.layout import Cell, Fields, Page, Paragraph, Table, Title, styled
from elaunch.views.logs import Choice
from elaunch.views.logtail import Line, LogFilter, RunLogs, newer, search
from elaunch.views.page import run_page
from elaunch.views.read import RunReader, read

RECENT: Final = 8
SPARKS: Final = " ▁▂▃▄▅▆▇█"
MOST_SPARKS: Final = 80
LEVELS: Final = {"bad": ("✗", "bold red"), "warn": ("!", "yellow")}


@dataclass(frozen=True)
class TopReading:
    """One reading of a run; ``page`` is what ``elaunch status`` shows of it."""

    job: JobDocument
    nodes: list[JudgedNode]
    page: Page
    attention: list[dict[str, str]]
    pace: str
    recent: tuple[Line, ...] | str


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

    def read(self, chosen: Key, opened: Collection[Key] | None = None) -> TopReading:
        """Read how the run stands, and the newest lines of what is chosen.

        The workers of ``opened`` nodes are asked for, of all where it is None.
        """
        seen = None if opened is None else {key[0] for key in (*opened, chosen) if key}
        job = self._reader.read(seen)
        page = run_page(job) if job.record else (Paragraph((one_line(job.reason or ""),)),)
        return TopReading(
            job=job,
            nodes=job.judged,
            page=tuple(part for part in page if not isinstance(part, Table)),
            attention=list(attention(job)),
            pace=self._reader.pace.text(job.state == "RUNNING"),
            recent=self.recent(chosen, job),
        )

    def recent(self, chosen: Key, job: JobDocument) -> tuple[Line, ...] | str:
        """Return the newest lines of what is chosen, or why there are none."""
        try:
            logs, wanted = self._wanted(chosen, job, "")
            return tuple(search(logs, wanted, most=RECENT)[0]["lines"][-RECENT:])
        except (ElaunchError, OSError) as error:
            return str(error)

    def _wanted(self, chosen: Key, job: JobDocument, needle: str) -> tuple[RunLogs, LogFilter]:
        # Without a choice the log of this node: those of others take a question to each agent.
        node = str(chosen[0] if chosen else own_node(job))
        logs = self._logs.setdefault(node, RunLogs(self._run, self._environ, node))
        ranks = frozenset(chosen[1:]) or None
        return logs, LogFilter(Choice(ranks=ranks), needle)

    def log(self, chosen: Key, job: JobDocument) -> LogPage:
        """Return the log of what is chosen, to be followed."""
        return LogPage(lambda needle: self._wanted(chosen, job, needle))

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


class LogPage:
    """The lines of a log: what is there when a needle is first asked for, then what comes."""

    def __init__(self, wanted: Callable[[str], tuple[RunLogs, LogFilter]]) -> None:
        self._wanted = wanted
        self._needle: str | None = None
        self._ends: dict[str, int] = {}
        self._held: dict[str, bytes] = {}

    def read(self, needle: str) -> tuple[bool, list[Text]]:
        """Return whether the lines take the place of those before, and the lines."""
        logs, chosen = self._wanted(needle)
        if needle != self._needle:
            found, self._ends = search(logs, chosen)
            self._needle, self._held = needle, {}
            return True, [log_line(line) for line in found["lines"]]
        return False, [log_line(line) for line in newer(logs, chosen, self._ends, self._held)]


def log_line(line: Line) -> Text:
    """Return one line of a log with its rank, stderr in another colour."""
    _, rank, stream, _, text = line
    shown = Text().append(f"[{rank}] ", "cyan")
    return shown.append(
        one_line(text.expandtabs()), style="yellow" if stream == "stderr" else "none"
    )


def _lines(text: str) -> list[Text]:
    return [Text(line) for line in block(text).expandtabs().split("\n")]


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
    if len(chosen) == 2:
        parts = _rank_page(reading, *chosen)
    elif chosen:
        parts = _node_page(reading, chosen[0])
    else:
        parts = reading.page
    first, rest = _halves(parts)
    shown: list[RenderableType] = [styled(first, width)]
    items = reading.attention or _unanswered(reading.nodes)
    if not chosen or reading.attention:
        shown += ["", _attention(items, width)]
    shown += ["", _recent(reading.recent)]
    if rest:
        shown += ["", styled(rest, width)]
    return Group(*shown)


def _halves(parts: Page) -> tuple[Page, Page]:
    """Return what stands above the lines and what below: of a job the fields are long."""
    at = next((i for i, part in enumerate(parts) if isinstance(part, Fields)), len(parts))
    return (parts, ()) if len(parts) - at < 2 else (parts[:at], parts[at:])


def _unanswered(found: Sequence[JudgedNode]) -> list[dict[str, str]]:
    """Return the first nodes that do not answer, as what needs attention."""
    silent = [
        f"node {one.number} {one.host}: {one.note}" for node in found if (one := node.seen).note
    ]
    return [{"level": "warn", "title": title, "detail": ""} for title in silent[:3]]


def _attention(items: list[dict[str, str]], width: int) -> RenderableType:
    if not items:
        return Text("nothing needs attention", style="green")
    text = Text()
    for at, item in enumerate(items):
        mark, color = LEVELS.get(item["level"], LEVELS["warn"])
        text.append("\n" if at else "").append(f"{mark} ", color)
        text.append(one_line(item["title"]), "bold")
        for line in item["detail"].splitlines()[:4]:
            text.append(f"\n  {one_line(line)[: 4 * width]}")
    return text


def _recent(lines: tuple[Line, ...] | str) -> RenderableType:
    if isinstance(lines, str):
        return Text(one_line(lines), style="dim")
    head = Text("last lines", style="dim")
    shown = [log_line(line) for line in lines] or [Text("none yet", style="dim")]
    for text in shown:
        text.no_wrap, text.overflow = True, "ellipsis"
    return Group(head, *shown)


def _node_page(reading: TopReading, number: int) -> Page:
    node = next((one for one in reading.nodes if one.seen.number == number), None)
    if node is None:
        return (Paragraph((f"node {number} is not in this round",)),)
    used = [worker.usage for _, _, worker in node.ranks if worker and worker.usage]
    facts = [("host", one_line(node.seen.host)), ("ranks", str(len(node.ranks)))]
    if node.seen.note:
        facts.append(("", node.seen.note))
    if any(worker for _, _, worker in node.ranks):
        facts.append(("cpu", f"{sum(one.tree_cpu_percent for one in used):.0f} % of a core"))
        facts.append(("memory", size(sum(one.tree_rss for one in used))))
    return (Title(f"node {number}", Cell(""), ""), Fields(tuple(facts)))


def _rank_page(reading: TopReading, number: int, rank: int) -> Page:
    node = next((one for one in reading.nodes if one.seen.number == number), None)
    worker = next((one[2] for one in node.ranks if one[1] == rank), None) if node else None
    note = node.seen.note if node else ""
    if worker is None:
        text = f"node {number}: {note or 'it has not been asked yet'}"
        return (Title(f"rank {rank}", Cell(""), ""), Paragraph((text,)))
    facts = [(name, one_line(text)) for name, text in _rank_facts(worker) if text]
    if note:
        facts.append(("", note))
    where = f"node {number}, local rank {worker.record['local_rank']}"
    title = Title(f"rank {rank}", Cell(worker.state, worker.state), where)
    return (title, Fields(tuple(facts)))


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
