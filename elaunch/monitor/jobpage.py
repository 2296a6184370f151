"""The page of ``elaunch status`` about a whole job, as plain data (see elaunch.monitor.page).

:func:`job_page` puts the state and its cause first, then how far the job got, its nodes by rank,
and those that stand by or join. :func:`jobs_page` is one row for each job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from elaunch.endings import how_it_ended
from elaunch.monitor.jobview import JobView, NodeView
from elaunch.monitor.page import (
    NOTHING,
    Cell,
    Column,
    Fields,
    Page,
    Paragraph,
    Part,
    Table,
    Title,
)
from elaunch.monitor.runpage import SHOWN_MESSAGE_LINES, restarts_text
from elaunch.rendezvous import text
from elaunch.rendezvous.plan import Plan, WorkerFailure
from elaunch.rendezvous.times import to_record
from elaunch.runs import verdict
from elaunch.text import duration, host_port, one_line

_NO_ROLES = ("default", "")


def job_page(view: JobView) -> Page:
    """Return the page of one job."""
    parts: list[Part] = [Title(one_line(view.run_id), Cell(view.state, view.state), _note(view))]
    if cause := tuple(one_line(line) for line in _cause(view)):
        parts.append(Paragraph(cause))
    parts.append(Fields(tuple((name, one_line(value)) for name, value in _facts(view))))
    if view.nodes:
        parts.append(_table(view.nodes))
    if apart := (*view.spares, *view.joining):
        parts.append(_table(apart))
    return tuple(parts)


def jobs_page(views: Sequence[JobView]) -> Page:
    """Return the page of several jobs in one store."""
    columns = (
        Column("run", elastic=True),
        Column("state"),
        Column("round", right=True),
        Column("restarts", right=True),
        Column("world size", right=True),
        Column("nodes", right=True),
        Column("reason", elastic=True),
    )
    return (Table(columns, tuple(_job_row(view) for view in views)),)


def _job_row(view: JobView) -> tuple[Cell, ...]:
    plan, restarts = view.plan, view.restarts
    used = NOTHING
    if restarts:
        used = str(restarts.used) if restarts.max is None else f"{restarts.used}/{restarts.max}"
    return (
        Cell(one_line(view.run_id)),
        Cell(view.state, view.state),
        Cell(_round(plan)),
        Cell(used),
        Cell(str(plan.world_size) if plan and plan.nodes else NOTHING),
        Cell(NOTHING if view.problem else str(len(view.nodes))),
        Cell(one_line(view.reason or NOTHING)),
    )


def _note(view: JobView) -> str:
    plan = view.plan
    if plan is None:
        return ""
    if plan.phase == "over":
        return f"exit code {plan.exit_code}"
    return f"round {plan.round}" if plan.round >= 0 else ""


def _round(plan: Plan | None) -> str:
    return str(plan.round) if plan and plan.round >= 0 else NOTHING


def _cause(view: JobView) -> Iterator[str]:
    """Yield why the job is in its state, what differs between nodes, which records are refused."""
    if view.stale:
        yield f"the store does not answer, this is what it said last: {view.stale}"
    if view.reason:
        yield view.reason
    # All nodes whose ranks wait say the same of the rank that they wait for.
    notes = (node.record.note for node in view.nodes if node.record is not None)
    if view.live and (note := next(filter(None, notes), "")):
        yield f"attention: {note}"
    plan, times = view.plan, view.times
    if view.live and times is not None and (late := to_record(times)["late"]) is not None:
        yield f"attention: {verdict.late_text(late)}"
    if plan and plan.failure and plan.phase in ("ending", "over"):
        yield from _failure(plan.failure)
    if plan and plan.notice:
        lines = plan.notice.splitlines()
        yield f"warning: {lines[0]}"
        yield from lines[1:]
    for name, problem in view.refused[:SHOWN_MESSAGE_LINES]:
        yield f"refused the record of {name}: {problem}"
    if more := view.refused[SHOWN_MESSAGE_LINES:]:
        yield f"refused {len(more)} more"


def _failure(failure: WorkerFailure) -> Iterator[str]:
    yield _which_failed(failure)
    yield from failure.text.splitlines()[:SHOWN_MESSAGE_LINES]


def _which_failed(failure: WorkerFailure) -> str:
    """Return which worker failed and how."""
    if failure.is_hang or failure.rank < 0 or failure.local_rank < 0:
        return text.failure(failure)
    first = (
        f"rank {failure.rank} (local_rank {failure.local_rank}, pid {failure.pid}) "
        f"on {failure.host or '?'} {how_it_ended(failure.exitcode)}"
    )
    return text.accused(failure.summary, first)


def _facts(view: JobView) -> Iterator[tuple[str, str]]:
    plan, restarts = view.plan, view.restarts
    yield "store", view.place
    if plan is not None:
        yield "round", _round(plan)
    if restarts is not None:
        yield (
            "restarts",
            restarts_text(restarts.used, restarts.without_progress, restarts.max, restarts.budget),
        )
    if plan is not None and plan.nodes:
        yield "world size", str(plan.world_size)
    yield "nodes", _census(view)
    if plan is None:
        return
    if plan.failure and plan.phase not in ("ending", "over"):
        yield "last failure", _which_failed(plan.failure)
    if plan.round >= 0:
        yield "resumed", _resumed(plan)
    if plan.master_addr:
        yield "master", host_port(plan.master_addr, plan.master_port)
    if plan.coordinator:
        hosts = {node.name: node.host for node in view.everyone}
        known = hosts.get(plan.coordinator)
        yield "coordinator", f"{plan.coordinator} on {known}" if known else plan.coordinator
    if view.times is not None:
        yield from verdict.facts_of_job(to_record(view.times))


def _census(view: JobView) -> str:
    """Count the nodes of the round by state, and the other agents that are there."""
    states = Counter(node.state for node in view.nodes)
    counts = [f"{count} {state}" for state, count in states.items()]
    text = f"{len(view.nodes)}: {', '.join(counts)}" if counts else "0"
    besides = [
        f"{len(those)} {what}"
        for those, what in ((view.spares, "standing by"), (view.joining, "joining"))
        if those
    ]
    return "; ".join([text, *besides])


def _resumed(plan: Plan) -> str:
    found = plan.checkpoint
    if found is None:
        return f"round {plan.round} began without a checkpoint"
    return f"round {plan.round} from step {found.step}: {found.path}"


def _table(nodes: Sequence[NodeView]) -> Table:
    columns = (
        Column("node", right=True),
        Column("name"),
        Column("host", elastic=True),
        Column("address", elastic=True),
        Column("state"),
        Column("ranks"),
        Column("slots", right=True),
        Column("lease age", right=True),
        Column("role", spare=True),
        Column("note", elastic=True),
    )
    return Table(columns, tuple(map(_row, nodes)), usual="alive").trimmed()


def _row(node: NodeView) -> tuple[Cell, ...]:
    return (
        Cell(NOTHING if node.rank is None else str(node.rank)),
        Cell(one_line(node.name)),
        Cell(one_line(node.host)),
        Cell(one_line(node.addr)),
        Cell(node.state, node.state),
        Cell(_ranks(node.ranks)),
        Cell(str(node.slots)),
        Cell(NOTHING if node.age_s is None else duration(node.age_s)),
        Cell(NOTHING if node.role in _NO_ROLES else one_line(node.role)),
        Cell(one_line(node.note) or NOTHING),
    )


def _ranks(ranks: tuple[int, int] | None) -> str:
    if ranks is None:
        return NOTHING
    first, last = ranks
    return str(first) if first == last else f"{first}-{last}"
