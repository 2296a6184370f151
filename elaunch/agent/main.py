"""Builds one node's agent from the settings, runs it, and leaves nothing behind.

In this order: signal handlers, standard files, run directory, log pump, server, control socket, the
loop; closed in the reverse order. Each part may be missing a capability (no place for a record, no
socket) without stopping the job; what is missing is reported once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from elaunch import env
from elaunch.agent import requests, signals
from elaunch.agent.failure.errorfile import write_launcher_error
from elaunch.agent.failure.reporter import Reporter
from elaunch.agent.hangs.progress import ProgressLines
from elaunch.agent.hangs.watch import HangWatch
from elaunch.agent.logs.ownlines import logging_to
from elaunch.agent.logs.pump import LogPlan, LogPump
from elaunch.agent.loop import Agent, Observer
from elaunch.agent.nodes.status import StatusPublisher
from elaunch.agent.policy import events
from elaunch.agent.resume.directory import DirectoryFinisher
from elaunch.agent.resume.latest import look
from elaunch.agent.resume.probe import DirectoryProbe
from elaunch.agent.saver.plan import SaverPlan
from elaunch.agent.saver.saver import AgentSaver
from elaunch.agent.status.decisionlog import DecisionLog
from elaunch.agent.status.eventlog import EventLog
from elaunch.agent.status.ledger import Ledger, VerdictLog, open_ledger, times_of_node
from elaunch.agent.status.liveline import LiveLine
from elaunch.agent.status.record import StatusRecord, shown_code
from elaunch.agent.status.socket import ControlSocket
from elaunch.agent.status.views import NodeViews
from elaunch.agent.status.webpages import WebPages
from elaunch.agent.workers.group import GroupPlan, WorkerGroup, check_open_files
from elaunch.agent.workers.links import WorkerLinks
from elaunch.agent.workers.tempdir import RunTemp
from elaunch.config import Settings
from elaunch.config.checks import NO_FILES
from elaunch.config.flags.table import SECRET_VARIABLES
from elaunch.errors import RunDirError, UsageError
from elaunch.rendezvous.decide.view import Search
from elaunch.rendezvous.plan import NodeStatus
from elaunch.rendezvous.standalone import Standalone, rules_of_one
from elaunch.runs import directory, statedir
from elaunch.server import devices, processes

if TYPE_CHECKING:
    from elaunch.agent.detach import Detached
    from elaunch.runs.record import Record

PING_TIMEOUT = 2.0

log = logging.getLogger("elaunch")

Inbox = queue.SimpleQueue[events.Event]


def run(settings: Settings, detached: Detached | None = None) -> int:
    """Run the job that ``settings`` describe on this node; return the command's exit code.

    ``detached``: the command that waits for a detached agent to be ready. Must be called in the
    main thread, which it keeps until the job has ended. Raises ElaunchError for what is found
    wrong before a worker was started.
    """
    check_open_files(devices.known(settings.nproc_per_node) or 1)
    inbox: Inbox = queue.SimpleQueue()
    handled = (
        *settings.signals_to_handle,
        *settings.forward_signals,
        *signals.not_ignored(settings.preempt_signals),
    )
    signals.install(handled, inbox.put)
    if settings.workdir is not None:
        os.chdir(settings.workdir)
    processes.become_subreaper()
    environ = {**env.launcher_environment(), **settings.env}
    for name in SECRET_VARIABLES:
        environ.pop(name, None)
    if settings.workdir is not None:
        environ["PWD"] = str(settings.workdir)
    code = _run(settings, environ, inbox, detached)
    signals.ignore(handled)
    return shown_code(code, settings)


def _run(
    settings: Settings, environ: Mapping[str, str], inbox: Inbox, detached: Detached | None
) -> int:
    """Run the job; whatever ends it early is in the run's record and the launcher's error file."""
    own_log_dir = _own_log_dir(settings)
    run_dir = directory.create(settings.run_id, os.environ)
    if detached is not None:
        detached.placed(run_dir)
    log_root = run_dir.logs if settings.log_dir is None else own_log_dir
    log_dir = None if log_root is None else str(log_root)
    status_record = StatusRecord(
        settings, run_dir, log_dir, warn=lambda text: log.warning("%s", text)
    )
    with contextlib.ExitStack() as stack:
        run_ = _Run(
            settings,
            run_dir,
            log_root,
            environ=environ,
            status_record=status_record,
            inbox=inbox,
            stack=stack,
        )
        try:
            return run_.run(detached)
        except BaseException as error:
            status_record.note_error(error)
            write_launcher_error(os.environ, error)
            raise


class _Run:
    """One run: starts its parts in order; ``stack`` closes in the reverse order what was started.

    ``log_root`` as in GroupPlan.
    """

    def __init__(
        self,
        settings: Settings,
        run_dir: directory.RunDir,
        log_root: Path | None,
        *,
        environ: Mapping[str, str],
        status_record: StatusRecord,
        inbox: Inbox,
        stack: contextlib.ExitStack,
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._log_root = log_root
        self._environ = environ
        self._status_record = status_record
        self._inbox = inbox
        self._stack = stack

    def run(self, detached: Detached | None) -> int:
        """Start the parts, then serve events to the end; return the exit code."""
        settings, status_record, inbox = self._settings, self._status_record, self._inbox
        lines = None if settings.progress_regex is None else ProgressLines(settings.progress_regex)
        pump = self._start_pump(lines)
        self._stack.enter_context(logging_to(pump.say, settings.log_level))
        if self._run_dir.notice is not None:
            log.warning("%s", self._run_dir.notice)
        self._open_http_ports()
        status_record.write()
        plan, group = self._start_group(pump)
        saver = AgentSaver(SaverPlan(settings, inbox.put, DirectoryFinisher(settings)))
        links, hangs = self._start_links(lines, group, saver)
        ledger = open_ledger(settings, self._run_dir, links, hangs=hangs, record=status_record)
        status_record.follow(
            hangs.record, saver.record, links.name, timing=ledger.record, lateness=hangs.lateness
        )
        views = NodeViews(hangs, self._log_root, status_record.snapshot)
        self._start_control(links, views)
        self._start_notices(group)
        pages = self._open_pages(group, pump)
        hook = (*self._start_event_hook(group), pages.see)
        self._start_kubeflow()
        if settings.progress:
            LiveLine(pump, status_record.snapshot).start(self._stack)
        publisher, standalone = self._join(plan, group, pump.say, saver, hangs, views)
        if standalone is None:
            publisher.follow(partial(times_of_node, ledger, hangs))
        self._stack.callback(saver.close)
        agent = Agent(
            settings,
            inbox,
            group=group,
            links=links,
            hangs=hangs,
            saver=saver,
            observers=self._observers(plan, group, pump, hangs, publisher, hook, ledger),
            standalone=standalone,
        )
        prune = partial(directory.prune_for, self._run_dir, os.environ)
        threading.Thread(target=prune, name="prune", daemon=True).start()
        saver.check()
        if detached is not None:
            detached.ready(pages.wait())
        return agent.run()

    def _start_pump(self, lines: ProgressLines | None) -> LogPump:
        plan = _log_plan(self._settings, self._log_root, self._environ)
        pump = LogPump(replace(plan, listener=lines.listener) if lines else plan)
        pump.start()
        self._stack.callback(lambda: pump.close(_console_patience(self._status_record)))
        return pump

    def _start_group(self, pump: LogPump) -> tuple[GroupPlan, WorkerGroup]:
        """Have the server import what it should while the agent makes its other parts."""
        settings, stack = self._settings, self._stack
        temp, variables = _own_temp(settings, self._environ, stack)
        environ = {
            **self._environ,
            **variables,
            **_own_timers(settings, self._run_dir, stack),
        }
        own_addr = _own_addr(settings)
        plan = GroupPlan(
            settings, self._run_dir, self._log_root, environ, self._inbox.put, own_addr, temp
        )
        group = WorkerGroup(plan, pump)
        stack.callback(group.close)
        group.open_endpoint()
        group.prepare(devices.known(settings.nproc_per_node))
        return plan, group

    def _start_links(
        self, lines: ProgressLines | None, group: WorkerGroup, saver: AgentSaver
    ) -> tuple[WorkerLinks, HangWatch]:
        links = WorkerLinks(self._inbox.put, saver.serve)
        links.start()
        self._stack.callback(links.close)
        hangs = HangWatch(self._settings, links, group, lines=lines, post=self._inbox.put)
        hangs.start()
        self._stack.callback(hangs.close)
        return links, hangs

    def _start_control(self, links: WorkerLinks, views: NodeViews) -> None:
        record = self._status_record
        control = ControlSocket(
            self._run_dir.socket,
            partial(record.snapshot, True),
            partial(requests.preempt, self._inbox, record),
            links.adopt,
            views.serve,
            restart=partial(requests.restart, self._inbox),
        )
        try:
            control.start()
        except (RunDirError, OSError) as error:
            log.warning("%s; `elaunch status` will read the record on disk", error)
        else:
            self._stack.callback(control.close)

    def _start_notices(self, group: WorkerGroup) -> None:
        """Have the workers asked to save and to end at --preempt-at, or by --notice-command."""
        settings = self._settings
        if settings.preempt_at is not None:
            timer = signals.timer(settings.preempt_at, settings.preempt_left, self._inbox.put)
            self._stack.callback(timer.cancel)
        if settings.notice_command is None:
            return
        from elaunch.agent.noticecommand import NoticeCommand, post_notice

        taken = partial(post_notice, self._inbox.put, settings.rendezvous is None)
        command = NoticeCommand(settings.notice_command, self._environ, group.reaper, taken)
        command.start()
        self._stack.callback(command.close)

    def _open_pages(self, group: WorkerGroup, pump: LogPump) -> WebPages:
        where, environ = self._run_dir.path, self._environ
        pages = WebPages(self._settings, where, environ, group.reaper, pump.say)
        self._stack.callback(pages.close)
        self._status_record.pages = lambda: pages.address
        return pages

    def _start_event_hook(self, group: WorkerGroup) -> tuple[Observer, ...]:
        """Have --on-event, if any, get what happens; return what sees the loop's turns."""
        target = self._settings.on_event
        if target is None:
            return ()
        from elaunch.agent.status.onevent import EventHook

        hook = EventHook(target, self._environ, group.reaper, self._status_record.snapshot)
        hook.start()
        self._stack.callback(hook.close)
        return (hook.see,)

    def _start_kubeflow(self) -> None:
        """Have Kubeflow learn how far the job is, where it asks for that."""
        if self._environ.get(env.KUBEFLOW_URL):
            from elaunch.agent.status.kubeflow import TrainJobStatus

            status = TrainJobStatus(self._environ, self._status_record.snapshot)
            status.start()
            self._stack.callback(status.close)

    def _open_http_ports(self) -> None:
        """Answer probes and Prometheus, where that is asked for; raises UsageError."""
        settings, status_record = self._settings, self._status_record
        if settings.health_check_port is None and settings.metrics_port is None:
            return
        from elaunch.agent.status.httpport import HttpPort
        from elaunch.runs.prometheus import RunReading, render

        def alive() -> dict[str, object]:
            answered = threading.Event()
            self._inbox.put(events.Ping(answered.set))
            if not answered.wait(PING_TIMEOUT):
                raise TimeoutError(f"the agent's loop did not answer within {PING_TIMEOUT:g} s")
            record = status_record.snapshot()
            return {name: record[name] for name in ("run_id", "state", "round", "restarts")}

        def metrics() -> str:
            record = cast("Record", status_record.snapshot())
            lasted = max(0.0, (record["ended_at"] or time.time()) - record["started_at"])
            return render([RunReading(self._run_dir.path.name, record, record["state"], lasted)])

        ports = []
        if settings.health_check_port is not None:
            ports.append(HttpPort(None, settings.health_check_port, alive))
        if settings.metrics_port is not None:
            ports.append(HttpPort(*settings.metrics_port, alive, metrics=metrics))
        for port in ports:
            port.start()
            self._stack.callback(port.close)

    def _join(
        self,
        plan: GroupPlan,
        group: WorkerGroup,
        say: Callable[[str], None],
        saver: AgentSaver,
        hangs: HangWatch,
        views: NodeViews,
    ) -> tuple[StatusPublisher, Standalone | None]:
        """Prepare to meet the other nodes' agents, or to be the one node by itself."""
        probing = DirectoryProbe(self._settings, self._inbox.put)
        self._stack.callback(probing.close)
        probing.start()
        if self._settings.rendezvous is None:
            return _alone(plan, say, saver.finishing)
        from elaunch.agent.nodes.connect import join

        return join(plan, group, say, self._stack, probing.nonce, saver, hangs, views), None

    def _observers(
        self,
        plan: GroupPlan,
        group: WorkerGroup,
        pump: LogPump,
        hangs: HangWatch,
        publisher: StatusPublisher,
        hook: tuple[Observer, ...],
        ledger: Ledger,
    ) -> tuple[tuple[Observer, ...], tuple[Observer, ...]]:
        """Return who sees each turn of the loop before its action, and who after it."""
        settings, record = self._settings, self._status_record
        reporter = Reporter(
            settings,
            self._run_dir,
            pump,
            group=group,
            status_record=record,
            publisher=publisher,
            progress=hangs.record,
            scene=hangs.scene,
        )
        decisions = DecisionLog(settings, plan.environ)
        plans: tuple[Observer, ...] = (publisher.see,) if settings.rendezvous is not None else ()
        early = (ledger.see, group.see, hangs.see, reporter.see, *plans, decisions.see)
        late = (reporter.report_on, publisher.publish, record.see, VerdictLog(record).see)
        return early, (*late, EventLog(settings, error_file=group.error_file).see, *hook)


def _alone(
    plan: GroupPlan, say: Callable[[str], None], finishing: DirectoryFinisher
) -> tuple[StatusPublisher, Standalone]:
    """Return the coordinator of a job of one node, and what gives it this agent's status."""
    settings = plan.settings
    rules = rules_of_one(
        settings.max_restarts,
        lifetime_budget=settings.restart_budget == "lifetime",
        has_checkpoint_dir=settings.checkpoint_dir is not None,
        max_same_failures=settings.max_same_failures,
    )

    def search(asked: Search) -> None:
        """Look in a thread of its own, since storage may hang."""
        threading.Thread(
            target=lambda: plan.post(look(settings, finishing, asked)),
            name="checkpoints",
            daemon=True,
        ).start()

    coordinator = Standalone(rules, plan.post, search, clock=time.monotonic)
    first = NodeStatus("", "", 0, 0, settings.role)  # the host needs no name
    return StatusPublisher(coordinator, first, say=say, post=plan.post), coordinator


def _own_addr(settings: Settings) -> str | None:
    if settings.rendezvous is None:
        return None
    from elaunch.config.rendezvous import own_address

    return own_address(settings.rendezvous)


def _own_temp(
    settings: Settings, environ: Mapping[str, str], stack: contextlib.ExitStack
) -> tuple[str | None, dict[str, str]]:
    """Make the run's directory for temporary files; return it and the variables that name it."""
    try:
        temp = RunTemp(settings.tmp, environ)
    except OSError as error:
        log.warning(
            "no directory for temporary files can be made: %s; the workers share one", error
        )
        return None, {}

    def close() -> None:
        if (left := temp.close()) is not None:
            log.warning("the workers left files in their TMPDIR, %s", left)

    stack.callback(close)
    return temp.path, temp.variables


def _own_timers(
    settings: Settings, run_dir: directory.RunDir, stack: contextlib.ExitStack
) -> dict[str, str]:
    """Make the pipe for torch.distributed.elastic.timer; return the variable that points to it."""
    if not settings.file_timer:
        return {}
    path = settings.timer_file or run_dir.timers
    try:
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
    except OSError as error:
        raise UsageError(
            f"{env.TIMER_FILE}: no named pipe can be made at {str(path)!r}: {error.strerror}; "
            "name a path on a local file system"
        ) from error
    stack.callback(path.unlink, missing_ok=True)
    return {env.TIMER_FILE: str(path)}


def _console_patience(status_record: StatusRecord) -> float:
    """Return how long to wait at the end for a console that takes nothing (a pager, Ctrl-S).

    A user who stopped the job does not wait for it; the log files are complete either way.
    """
    return 2.0 if status_record.snapshot()["state"] == "STOPPED" else 30.0


def _own_log_dir(settings: Settings) -> Path | None:
    """Make this run's directory under --log-dir; None without the flag, or for no files at all."""
    if settings.log_dir in (None, NO_FILES):
        return None
    prefix = statedir.file_name(settings.run_id) + "_"
    try:
        os.makedirs(str(settings.log_dir), exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=settings.log_dir)).absolute()
    except OSError as error:
        raise UsageError(
            f"--log-dir {settings.log_dir}: cannot create a directory there: {error.strerror}",
            code="E-LOG-DIR",
        ) from error


def _log_plan(settings: Settings, log_root: Path | None, environ: Mapping[str, str]) -> LogPlan:
    return LogPlan(
        log_root=log_root,
        redirects=settings.redirects.of,
        tee=settings.tee.of,
        console_ranks=settings.local_ranks_filter,
        stdout_filters=settings.duplicate_stdout_filters,
        stderr_filters=settings.duplicate_stderr_filters,
        prefix_template=settings.log_line_prefix_template or environ.get(env.LOG_PREFIX_TEMPLATE),
        role=settings.role,
    )
