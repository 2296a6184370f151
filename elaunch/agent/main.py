"""Makes one node's agent of its parts, runs it, and leaves nothing behind.

In this order: signal handlers, standard files, run directory, log pump, server, control socket, the
loop; closed in the reverse order. Each part may be missing a capability (no place for a record, no
socket) without stopping the job; what is missing is reported once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from signal import Signals
from typing import TYPE_CHECKING

from elaunch import atonce
from elaunch.agent import frontends, signals
from elaunch.agent.context import RunContext, SaverSetup
from elaunch.agent.failure import explain
from elaunch.agent.failure.errorfile import write_launcher_error
from elaunch.agent.failure.reporter import Reporter
from elaunch.agent.hangs import scene
from elaunch.agent.hangs.progress import ProgressLines
from elaunch.agent.hangs.sample import Sampler
from elaunch.agent.logs.console import logging_to
from elaunch.agent.logs.files import own_log_directory
from elaunch.agent.logs.plan import plan_of_run
from elaunch.agent.logs.pump import LogPump
from elaunch.agent.loop import Agent, Observer
from elaunch.agent.nodes.status import StatusPublisher
from elaunch.agent.policy import events
from elaunch.agent.resume.directory import DirectoryFinisher
from elaunch.agent.resume.latest import DirectoryProbe, look
from elaunch.agent.saver.saver import AgentSaver
from elaunch.agent.status.decisionlog import DecisionLog
from elaunch.agent.status.eventlog import EventLog
from elaunch.agent.status.ledger import Ledger, VerdictLog, open_ledger, times_of_node
from elaunch.agent.status.record import StatusRecord, shown_code
from elaunch.agent.status.views import NodeViews
from elaunch.agent.workers.group import WorkerGroup, check_open_files
from elaunch.agent.workers.links import WorkerLinks
from elaunch.agent.workers.tempdir import remove_abandoned
from elaunch.config import Settings
from elaunch.rendezvous.coordinator import Standalone, rules_of_one
from elaunch.rendezvous.decide.view import Search
from elaunch.rendezvous.plan import NodeStatus
from elaunch.runs import directory
from elaunch.server import devices, processes

if TYPE_CHECKING:
    from elaunch.agent.detach import Detached

log = logging.getLogger("elaunch")

Inbox = queue.SimpleQueue[events.Event]


def run(
    settings: Settings,
    environ: Mapping[str, str],
    handled: Sequence[Signals],
    *,
    detached: Detached | None = None,
) -> int:
    """Run the job as elaunch.agent.startup does, which knows variables and handled signals."""
    check_open_files(devices.known(settings.nproc_per_node) or 1)
    inbox: Inbox = queue.SimpleQueue()
    signals.install(handled, inbox.put, ending=settings.signals_to_handle)
    processes.become_subreaper()
    code = _run(settings, environ, inbox, detached)
    signals.ignore(handled)
    return shown_code(code, settings)


def _run(
    settings: Settings, environ: Mapping[str, str], inbox: Inbox, detached: Detached | None
) -> int:
    """Run the job; whatever ends it early is in the run's record and the launcher's error file."""
    own_log_dir = own_log_directory(settings)
    run_dir = directory.create(settings.run_id, os.environ)
    if detached is not None:
        detached.redirect_output(run_dir)
    log_root = run_dir.logs if settings.log_dir is None else own_log_dir
    log_dir = None if log_root is None else str(log_root)
    record = StatusRecord(settings, run_dir, log_dir, warn=lambda text: log.warning("%s", text))
    context = RunContext(settings, run_dir, log_root, environ, inbox.put, record)
    with contextlib.ExitStack() as stack:
        try:
            return _Run(context, stack, inbox).run(detached)
        except BaseException as error:
            record.note_error(error)
            write_launcher_error(os.environ, error)
            raise


class _Run:
    """One run: starts its parts in order; ``stack`` closes in the reverse order what was started.

    The loop takes the events of ``inbox``.
    """

    def __init__(self, context: RunContext, stack: contextlib.ExitStack, inbox: Inbox) -> None:
        self._context = context
        self._stack = stack
        self._inbox = inbox

    def run(self, detached: Detached | None) -> int:
        """Start the parts, then serve events to the end; return the exit code."""
        context, stack = self._context, self._stack
        settings, record = context.settings, context.record
        lines = None if settings.progress_regex is None else ProgressLines(settings.progress_regex)
        pump = self._start_pump(lines)
        stack.enter_context(logging_to(pump.show, settings.log_level))
        result = VerdictLog(record)
        stack.callback(result.log)
        if context.run_dir.notice is not None:
            log.warning("%s", context.run_dir.notice)
        frontends.open_ports(context, stack)
        record.write()
        group = self._start_group(pump)
        saver = AgentSaver(SaverSetup(settings, context.post, DirectoryFinisher(settings)))
        links, sampler = self._start_links(lines, group, saver)
        ledger = open_ledger(settings, context.run_dir, links, sampler=sampler, record=record)
        record.progress, record.saves, record.name = sampler.record, saver.record, links.name
        record.timing, record.lateness = ledger.record, sampler.lateness
        record.awaited = sampler.awaited
        views = NodeViews(
            *(sampler.workers, sampler.read_stacks, context.log_root, record.snapshot),
            watched=settings.hang_timeout is not None,
        )
        pages, watching = frontends.start(
            context, stack, group.reaper, links=links, views=views, pump=pump
        )
        publisher, standalone = self._join(group, pump.show, saver, sampler, views)
        if standalone is None:
            publisher.follow(partial(times_of_node, ledger, sampler), sampler.awaited)
        stack.callback(saver.close)
        reporter, early, late = self._observers(group, pump, sampler, publisher, ledger)
        agent = Agent(
            settings,
            self._inbox,
            group=group,
            links=links,
            sampler=sampler,
            saver=saver,
            observers=(reporter, early, (*late, result.see, *watching)),
            standalone=standalone,
        )
        prune = partial(directory.prune_for, context.run_dir, os.environ, settings.keep_runs)
        atonce.start("prune", prune)
        atonce.start("tmp", remove_abandoned)
        saver.check()
        if detached is not None:
            detached.ready(pages.wait())
        explain.prepare()  # the server imports what it should meanwhile
        return agent.run()

    def _start_pump(self, lines: ProgressLines | None) -> LogPump:
        context, listener = self._context, lines.listener if lines else None
        pump = LogPump(plan_of_run(context.settings, context.log_root, context.environ, listener))
        pump.start()

        def close() -> None:
            """Wait for a console that takes nothing: a pager, Ctrl-S.

            A user who stopped the job does not wait; the log files are complete either way.
            """
            pump.close(2.0 if context.record.snapshot()["state"] == "STOPPED" else 30.0)

        self._stack.callback(close)
        return pump

    def _start_group(self, pump: LogPump) -> WorkerGroup:
        """Have the server import what it should while the agent makes its other parts."""
        group = WorkerGroup(self._context, pump)
        self._stack.callback(group.close)
        group.open()
        group.prepare(devices.known(self._context.settings.nproc_per_node))
        return group

    def _start_links(
        self, lines: ProgressLines | None, group: WorkerGroup, saver: AgentSaver
    ) -> tuple[WorkerLinks, Sampler]:
        post = self._context.post
        links = WorkerLinks(post, saver.serve)
        links.start()
        self._stack.callback(links.close)
        sampler = Sampler(self._context.settings, links, group, lines=lines, post=post)
        sampler.start()
        self._stack.callback(sampler.close)
        return links, sampler

    def _join(
        self,
        group: WorkerGroup,
        show: Callable[[str], None],
        saver: AgentSaver,
        sampler: Sampler,
        views: NodeViews,
    ) -> tuple[StatusPublisher, Standalone | None]:
        """Prepare to meet the other nodes' agents, or to be the one node by itself."""
        context, stack = self._context, self._stack
        probe = DirectoryProbe(context.settings, context.post)
        stack.callback(probe.close)
        probe.start()
        if context.settings.rendezvous is None:
            return _alone(context, show, saver.finisher)
        from elaunch.agent.nodes.connect import join

        publisher = join(
            context,
            stack,
            group,
            show=show,
            probe=probe.nonce,
            saver=saver,
            sampler=sampler,
            views=views,
        )
        return publisher, None

    def _observers(
        self,
        group: WorkerGroup,
        pump: LogPump,
        sampler: Sampler,
        publisher: StatusPublisher,
        ledger: Ledger,
    ) -> tuple[Reporter, tuple[Observer, ...], tuple[Observer, ...]]:
        """Return the reporter, what sees each turn before its action, and what sees it after."""
        context, settings, record = self._context, self._context.settings, self._context.record
        reporter = Reporter(
            settings,
            context.run_dir,
            pump,
            group=group,
            status_record=record,
            publisher=publisher,
            progress=sampler.record,
            look=(lambda *_: None) if settings.no_stacks else partial(scene.look, sampler),
        )
        decisions = DecisionLog(settings, context.environ)
        self._stack.callback(decisions.release)
        plans: tuple[Observer, ...] = (publisher.see,) if settings.rendezvous is not None else ()
        early = (ledger.see, group.see, sampler.workers.see, reporter.see, *plans, decisions.see)
        late = (reporter.report_on, publisher.publish, record.see)
        see_torchs = EventLog(settings, group.error_file).see
        return reporter, early, (*late, see_torchs)


def _alone(
    context: RunContext, show: Callable[[str], None], finisher: DirectoryFinisher
) -> tuple[StatusPublisher, Standalone]:
    """Return the coordinator of a job of one node, and what gives it this agent's status."""
    settings, post = context.settings, context.post
    rules = rules_of_one(
        settings.max_restarts,
        lifetime_budget=settings.restart_budget == "lifetime",
        has_checkpoint_dir=settings.checkpoint_dir is not None,
        max_same_failures=settings.max_same_failures,
    )

    def search(asked: Search) -> None:
        """Look in a thread of its own, since storage may hang."""
        atonce.start("checkpoints", lambda: post(look(settings, finisher, asked)))

    coordinator = Standalone(rules, post, search, clock=time.monotonic)
    first = NodeStatus("", "", 0, 0, settings.role)  # the host needs no name
    return StatusPublisher(coordinator, first, show=show, post=post), coordinator
