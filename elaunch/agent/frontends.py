"""The frontends, by which people and programs see the run and ask something of it.

==================  ==============================================================================
part                for
==================  ==============================================================================
HTTP ports          probes and Prometheus (``--health-check-port``, ``--metrics-port``)
control socket      `elaunch status`, `elaunch preempt`, … and the workers
timer, command      a notice that this machine will be taken (``--preempt-at``,
                    ``--notice-command``)
web pages           people with a browser (``--dashboard``)
event hook          programs that want to know what happens (``--on-event``)
Kubeflow            a TrainJob that asks how far it is
live line           a person at a terminal (``--progress``)
==================  ==============================================================================

The live line is drawn anew each second on a terminal, below what the workers print, and gone at the
end. Elsewhere it is an ordinary line of the agent's, every PLAIN_S. A thread reads the run's record
for it; the log pump, which alone writes to the console, draws it (elaunch.agent.logs.console).

A part that cannot be had is logged, and the job goes on without it; but for a port that is in use.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, cast

from elaunch import env
from elaunch.agent.children import Reaper
from elaunch.agent.context import RunContext
from elaunch.agent.logs.pump import LogPump
from elaunch.agent.loop import Observer
from elaunch.agent.patience import repeatedly
from elaunch.agent.policy import events
from elaunch.agent.status.record import StatusRecord
from elaunch.agent.status.socket import ControlSocket
from elaunch.agent.status.views import NodeViews
from elaunch.agent.status.webpages import WebPages
from elaunch.agent.workers.links import WorkerLinks
from elaunch.config.values import Moment
from elaunch.errors import RunDirError
from elaunch.runs import verdict
from elaunch.runs.pace import StepRate
from elaunch.runs.record import Record
from elaunch.text import duration

CLOCK_S: Final = 10.0
"""Seconds after which the wall clock is read again."""
PING_TIMEOUT: Final = 2.0
"""Seconds for the loop to show that it is alive."""
LOOP_PATIENCE: Final = 1.0
"""Seconds for the loop to answer a request; far less than a client waits."""

log = logging.getLogger("elaunch")

Post = Callable[[events.Event], None]


def open_ports(context: RunContext, stack: contextlib.ExitStack) -> None:
    """Answer probes and Prometheus, where that is asked for; raises UsageError."""
    settings = context.settings
    if settings.health_check_port is None and settings.metrics_port is None:
        return
    from elaunch.agent.status.httpport import HttpPort

    alive, metrics = partial(_alive, context), partial(_metrics, context)
    ports = []
    if settings.health_check_port is not None:
        ports.append(HttpPort(None, settings.health_check_port, alive))
    if settings.metrics_port is not None:
        ports.append(HttpPort(*settings.metrics_port, alive, metrics=metrics))
    for port in ports:
        port.start()
        stack.callback(port.close)


def _alive(context: RunContext) -> dict[str, object]:
    """Return how the run is; TimeoutError: the agent's loop does not answer."""
    answered = threading.Event()
    context.post(events.Ping(answered.set))
    if not answered.wait(PING_TIMEOUT):
        raise TimeoutError(f"the agent's loop did not answer within {PING_TIMEOUT:g} s")
    record = context.record.snapshot()
    return {name: record[name] for name in ("run_id", "state", "round", "restarts")}


def _metrics(context: RunContext) -> str:
    from elaunch.runs.job import JobDocument
    from elaunch.runs.prometheus import render

    record = cast("Record", context.record.snapshot())
    return render(
        [JobDocument(context.run_dir, record, record["state"], None, "answers", time.time())]
    )


def start(
    context: RunContext,
    stack: contextlib.ExitStack,
    reaper: Reaper,
    *,
    links: WorkerLinks,
    views: NodeViews,
    pump: LogPump,
) -> tuple[WebPages, tuple[Observer, ...]]:
    """Start all but the ports; return the web pages, and what sees the loop's turns.

    ``reaper`` starts commands, ``links`` takes the workers that attach to the control socket, and
    ``views`` answers the commands that do; ``pump`` prints.
    """
    _start_control(context, stack, links, views)
    _start_notices(context, stack, reaper)
    settings, snapshot = context.settings, context.record.snapshot
    pages = WebPages(settings, context.run_dir.path, context.environ, reaper, pump.show)
    stack.callback(pages.close)
    context.record.pages = lambda: pages.address
    observers: list[Observer] = []
    if settings.on_event is not None:
        from elaunch.agent.status.onevent import EventHook

        hook = EventHook(settings.on_event, context.environ, reaper, snapshot)
        hook.start()
        stack.callback(hook.close)
        observers.append(hook.see)
    if context.environ.get(env.KUBEFLOW_URL):
        from elaunch.agent.status.kubeflow import TrainJobStatus

        status = TrainJobStatus(context.environ, snapshot)
        status.start()
        stack.callback(status.close)
    if settings.progress:
        show_progress(pump, snapshot, stack)
    return pages, (*observers, pages.see)


def _start_control(
    context: RunContext, stack: contextlib.ExitStack, links: WorkerLinks, views: NodeViews
) -> None:
    control = ControlSocket(
        context.run_dir.socket,
        partial(context.record.snapshot, True),
        partial(preempt, context.post, context.record),
        links.adopt,
        views.serve,
        restart=partial(restart, context.post),
    )
    try:
        control.start()
    except (RunDirError, OSError) as error:
        log.warning("%s; `elaunch status` will read the record on disk", error)
    else:
        stack.callback(control.close)


def _start_notices(context: RunContext, stack: contextlib.ExitStack, reaper: Reaper) -> None:
    """Have the workers asked to save and to end at --preempt-at, or by --notice-command."""
    settings, post = context.settings, context.post
    if settings.preempt_at is not None:
        stack.callback(preempt_timer(settings.preempt_at, post).set)
    if settings.notice_command is None:
        return
    from elaunch.agent.noticecommand import NoticeCommand, post_notice

    post_it = partial(post_notice, post, settings.rendezvous is None)
    command = NoticeCommand(settings.notice_command, context.environ, reaper, post_it)
    command.start()
    stack.callback(command.close)


def preempt_timer(moment: Moment, post: Post) -> threading.Event:
    """Post PreemptAsked at that moment; return what ends the wait, if it is set.

    A time is one of the wall clock, which may be set meanwhile; a duration is not. What is left
    until the platform's end counts when the moment has come.
    """
    over, at, end = threading.Event(), moment.at, moment.before_end
    until = math.inf if moment.after is None else time.monotonic() + moment.after

    def left() -> float:
        return until - time.monotonic() if at is None else at - time.time()

    def wait() -> None:
        while (seconds := left()) > 0:
            if over.wait(min(seconds, CLOCK_S)):
                return
        rest = None if end is None else max(0.0, left() + end)
        post(events.PreemptAsked("the time of --preempt-at has come", lambda _: None, rest))

    threading.Thread(target=wait, name="preempt-at", daemon=True).start()
    return over


# ── what commands ask of the loop ────────────────────────────────────────────────────────────────


def preempt(post: Post, status_record: StatusRecord, reason: str, left: float | None = None) -> str:
    """Ask the loop that the job end and be continued; return what is done about it.

    ``left``: seconds until the platform ends it, if that is known.
    """
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    post(events.PreemptAsked(reason, answers.put, left))
    try:
        return answers.get(timeout=LOOP_PATIENCE)
    except queue.Empty:
        code = status_record.snapshot()["exit_code"]
        if code is not None:
            return f"{reason}: the job has ended already, with {code}"
        return f"{reason}: accepted; the agent is busy, and acts on it as soon as it is not"


def restart(post: Post, reason: str) -> tuple[str, bool]:
    """Ask the loop for another round; return what is done about it, and whether it is."""
    answers: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
    post(events.RestartAsked(reason, answers.put, time.monotonic()))
    try:
        return answers.get(timeout=LOOP_PATIENCE)
    except queue.Empty:
        return f"{reason}: accepted; the agent is busy, and acts on it as soon as it is not", True


DRAWN_S: Final = 1.0
PLAIN_S: Final = 30.0


def show_progress(
    pump: LogPump, snapshot: Callable[[], Mapping[str, Any]], stack: contextlib.ExitStack
) -> None:
    """Have the pump show the live line until ``stack`` is closed.

    ``snapshot`` returns the run's record, with the progress of now.
    """
    pace, plain_at = StepRate(), time.monotonic() + PLAIN_S

    def draw() -> None:
        nonlocal plain_at
        line = line_of(snapshot(), pace, time.time())
        if pump.on_terminal:
            pump.show_live(line)
        elif time.monotonic() >= plain_at:
            plain_at = time.monotonic() + PLAIN_S
            pump.show(line)

    stack.callback(pump.show_live, "")
    stack.enter_context(repeatedly(draw, DRAWN_S, DRAWN_S, ends_in=DRAWN_S))


def line_of(record: Mapping[str, Any], pace: StepRate, now: float) -> str:
    """Return the line for a record that was read ``now``, in seconds since the epoch."""
    workers = (record.get("progress") or {}).get("workers", ())
    pace.see(now, record["round"], workers)
    parts = [] if record["state"] == "RUNNING" else [record["state"]]
    parts.append(pace.text() or f"no step is reported, for {duration(now - record['started_at'])}")
    if (share := verdict.goodput(record)) is not None:
        parts.append(f"goodput {100 * share:.1f} %")
    if record["round"]:
        parts.append(f"round {record['round']}")
    return f"elaunch: {', '.join(parts)}"
