"""The server: one thread that forks workers, learns of their ends, and sweeps what they leave.

It is the subreaper of everything that workers start and holds the agent's lifeline. It blocks in
one ``poll`` on three things: the agent's messages (elaunch.server), the store host's, and
the wake-up pipe that SIGCHLD writes to. Signals that people send are blocked here and unblocked in
each worker, so that a signal sent to a worker while it is being forked is kept, not lost.

While it imports modules for the next round, it goes on to report exits, to signal and to sweep, and
has the store of a round opened; other messages are kept until the end of the import.

It must stay single-threaded and without a CUDA context: it is forked for each worker. After
``configure`` it imports the modules to preload; where one of them has started threads, the agent
replaces it by a server that imports nothing.
"""

from __future__ import annotations

import gc
import math
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NoReturn

from elaunch import env, proc
from elaunch.endings import Exit
from elaunch.server import devices, numa, processes, worker
from elaunch.server.preload import ANNOUNCED, Later, Preloaded, preload
from elaunch.server.processes import Sweep
from elaunch.server.stores import Stores
from elaunch.server.timers import Timers, worker_above
from elaunch.server.worker import Job
from elaunch.wire import recorder
from elaunch.wire.local import LocalChannel, Message, close_files, is_readable

MAX_FILES = 2
"""Descriptors of one message: a worker's stdout and stderr."""
FENCED = -2
"""The round in the answer to a sweep that the agent has not asked for."""

BLOCKED = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}


def serve(lifeline: int, of_caller: bool = False) -> Job:
    """Serve the agent at the other end of ``lifeline``; returns only in a forked worker.

    ``of_caller``: this process is a fork of a program, and what that has open, or has set as its
    random states, is the workers' as well.
    """
    if not of_caller:
        _close_all_but(lifeline)
    os.set_inheritable(lifeline, False)
    processes.become_subreaper()
    processes.die_with_parent()  # until the imports are done: the lifeline is not read before
    return Server(socket.socket(fileno=lifeline), of_caller).run()


def _close_all_but(kept: int) -> None:
    """Close what the launcher's own parent left open; torchrun's workers do not get it either.

    Open files with code of this process stay: libffi maps that of further callbacks from its own.
    """
    code = proc.mapped_code()
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if fd > 2 and fd != kept and os.readlink(f"/proc/self/fd/{fd}") not in code:
                os.close(fd)
        except OSError:  # the one that listed the directory is closed already
            continue


class Server:
    """Owns the workers of one agent, their store host, and the files that lead to the agent."""

    def __init__(self, agent: socket.socket, of_caller: bool = False) -> None:
        self._agent = LocalChannel(agent, most_files=MAX_FILES)
        self._of_caller = of_caller
        self._pid = os.getpid()
        self._workers: dict[int, Job] = {}  # by pid
        self._stopped: set[int] = set()  # pids of workers that were alive when sent a signal to end
        self._unswept: set[int] = set()  # pids of workers that have ended since the last sweep
        self._sweep: Sweep | None = None
        self._stores = Stores(self._send, self._forget)
        self._fork_start = False
        self._open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._later = Later()
        self._kept: list[tuple[Message, list[int]]] = []
        """Messages that came during an import and wait for its end."""
        self._timers = Timers()
        self._expired: dict[int, str] = {}  # pid of a worker → its timer that has expired
        self._temp: str | None = None
        self._bindings: tuple[numa.Binding, ...] = ()
        self._fence = math.inf
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self._old_handlers = {
            signum: signal.signal(signum, lambda *_: None)
            for signum in (signal.SIGCHLD, *ANNOUNCED)
        }
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def run(self) -> Job:
        """Serve until the lifeline closes (never returns), or until this is a forked worker."""
        while True:
            ready = self._wait()
            for fd in ready:
                job = self._serve_file(fd)
                if job is not None:
                    return job
            self._end_expired()
            self._collect()
            if self._agent.fileno() not in ready:  # a later fence may wait to be read
                self._keep_fence()
            self._stores.start_waiting()
            job = self._import_later()
            if job is not None:
                return job

    def _serve_file(self, fd: int) -> Job | None:
        if fd == self._wake_read:
            self._drain_wakeups()
        elif fd == self._agent.fileno():
            return self._serve_agent()
        elif fd in self._timers.files:
            self._timers.read()
        elif fd in self._later.files:
            self._later.adopt(partial(self._serve_meanwhile, None))
            gc.freeze()
            return self._handle_kept()
        else:
            self._stores.receive(fd)
        return None

    def _serve_agent(self) -> Job | None:
        """Do what the agent has sent; returns a job in the worker that was forked for it."""
        try:
            for message, files in self._agent.drain():
                job = self._handle(message, files)
                if job is not None:
                    return job
        except EOFError:
            self._end()
        return None

    def _wait(self) -> list[int]:
        own = (self._wake_read, self._agent.fileno())
        others = (*self._stores.files, *self._timers.files, *self._later.files)
        soonest = min(self._later.due, self._stores.due, self._timers.due)
        return self._poll((*own, *others), soonest)

    def _poll(self, files: Iterable[int], soonest: float) -> list[int]:
        """Wait until ``soonest``, or something is due or can be read; return what can be."""
        poll = select.poll()
        for fd in files:
            poll.register(fd, select.POLLIN)
        soonest = min(soonest, self._fence_due())
        if self._sweep is not None:
            soonest = min(soonest, self._sweep.next_look())
        timeout = None if soonest == math.inf else max(0.0, soonest - time.monotonic()) * 1000
        ready = [fd for fd, _ in poll.poll(timeout)]
        # The host's answer first: an order of the agent may wait for it, and would then take it.
        return sorted(ready, key=lambda fd: fd == self._agent.fileno())

    def _handle(self, message: Message, files: list[int]) -> Job | None:
        op = message["op"]
        if op == "start":
            return self._start(message, files)
        if op == "configure":
            self._configure(message)
        elif op == "store":
            self._stores.open(message, files[0])
        elif op == "signal":
            self._signal(message)
        elif op == "sweep":
            self._begin_sweep(message)
        elif op == "fence":
            self._fence = message["until"]
        elif op == "count_devices":
            processes.die_with_parent()  # the lifeline is not read while torch is imported there
            count, problem = devices.count_in_fork(message["kind"], message["interpreter"])
            processes.outlive_parent()
            self._send({"op": "devices", "count": count, "problem": problem})
        else:
            raise ValueError(f"unknown message from the agent: {message}")
        return None

    def _configure(self, message: Message) -> None:
        self._fork_start = message["start"] == "fork"
        if message["environ"] is not None:
            os.environ.clear()
            os.environ.update(message["environ"])
        self._open_files = tuple(message["open_files"])
        processes.raise_open_files()
        path, self._temp = message["import_path"], message["temp"]
        found = preload(message["preload"], path) if self._fork_start else Preloaded()
        problem = found.problem or self._timers.open(message["timer_file"])
        if message["numa_binding"] is not None and problem is None:
            words = (message["numa_binding"], message["nproc"], message["interpreter"])
            self._bindings, problem = numa.bindings(*words)
        later = message["later"] if self._fork_start else []
        self._later.plan(later, path, message["later_delay"])
        processes.set_title(f"elaunch: server of {message['run_id']}")
        if problem is None and self._fork_start and message["preload"]:
            self._stores.start()
        recorder.prepare()
        gc.freeze()  # what is imported is never collected, so its pages stay shared with workers
        processes.outlive_parent()
        self._send({"op": "ready", "problem": problem, "unforkable": found.unforkable})

    def _import_later(self) -> Job | None:
        """Import what is due; returns a job in the worker that was forked for it meanwhile."""
        if time.monotonic() < self._later.due or self._sweep is not None:
            return None
        began = time.monotonic()
        warmed = self._later.carry_out(self._serve_meanwhile)
        gc.freeze()
        if warmed is not None:
            seconds = time.monotonic() - began
            self._send({"op": "warmed", "seconds": seconds, **warmed._asdict()})
        return self._handle_kept()

    def _handle_kept(self) -> Job | None:
        """Do what came during an import; returns a job in the worker that was forked for it."""
        while self._kept:
            job = self._handle(*self._kept.pop(0))
            if job is not None:
                return job
        return None

    def _serve_meanwhile(self, until: int | None) -> None:
        """Do what cannot wait for the end of an import: once, or until that file can be read."""
        files = [self._wake_read, self._agent.fileno(), *([] if until is None else [until])]
        done = False
        while not done:
            ready = self._poll(files, -math.inf if until is None else math.inf)
            done = until is None or until in ready
            if self._wake_read in ready:
                self._drain_wakeups()
            if self._agent.fileno() in ready:
                self._keep_for_later()
            self._collect()
            if self._agent.fileno() not in ready:
                self._keep_fence()

    def _keep_for_later(self) -> None:
        """Do what the agent has sent as far as it starts nothing, and keep the rest.

        What a sweep finds here has not begun, and never will.
        """
        try:
            for message, files in self._agent.drain():
                while message["op"] == "sweep" and self._kept:
                    close_files(self._kept.pop()[1])
                at_once = message["op"] in ("signal", "sweep", "store") and not self._kept
                if at_once or message["op"] == "fence":
                    self._handle(message, files)
                else:
                    self._kept.append((message, files))
        except EOFError:
            self._end()

    def _start(self, message: Message, files: Sequence[int]) -> Job | None:
        fields = {key: value for key, value in message.items() if key != "op"}
        fields["args"] = tuple(fields["args"])
        job = Job(**fields, stdout=files[0], stderr=files[1])
        try:
            pid = os.fork()
        except OSError as error:
            problem = f"{error.strerror}; see the limits on processes (ulimit -u, pids.max)"
            failed = {"op": "not_started", "round": job.round, "local_rank": job.local_rank}
            self._send({**failed, "problem": problem})
            return None
        if pid == 0:
            return self._in_worker(job)
        for fd in files:
            os.close(fd)
        self._workers[pid] = job
        if job.mode != "command":
            self._later.note_start(pid, job.env)
        started = {"op": "started", "round": job.round, "local_rank": job.local_rank, "pid": pid}
        self._send({**started, "at": time.monotonic()})
        return None

    def _in_worker(self, job: Job) -> Job:
        self._forget()
        resource.setrlimit(resource.RLIMIT_NOFILE, self._open_files)
        worker.detach(job, self._pid, self._mask)
        if self._bindings:
            numa.bind(self._bindings[job.local_rank])
        if not self._fork_start or job.mode == "command" or "torch" not in sys.modules:
            worker.choose_agent_store()
        if not self._fork_start or job.mode == "command":
            worker.replace(job)
        self._later.announce(self._pid)
        worker.become(job, fresh=not self._of_caller)
        return job

    def _forget(self) -> None:
        """Close, in a fork, what belongs to the server alone."""
        signal.set_wakeup_fd(-1)
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._timers.close()
        self._later.close_in_fork()
        for _, files in self._kept:
            close_files(files)
        self._agent.close_here()
        self._stores.close_in_fork()

    def _signal(self, message: Message) -> None:
        # This process keeps such a signal blocked: where it is pending, its sender has signalled
        # all processes of the job. It is taken here, so that the next one is known for itself.
        if message.get("once") and signal.sigtimedwait([message["signum"]], 0) is not None:
            return
        if message["stops"]:
            self._note_stop()
        signums = [message["signum"]]
        if message["stops"]:  # one that somebody has stopped (SIGSTOP) takes it once it goes on
            signums.append(signal.SIGCONT)
        shielded = message.get("shielded", ()) if message["signum"] == signal.SIGTERM else ()
        for pid, job in self._workers.items():
            for signum in [signal.SIGKILL] if job.local_rank in shielded else signums:
                processes.signal_child(pid, signum, message["group"])

    def _end_expired(self) -> None:
        """Kill the processes whose timers have expired, and keep which of a worker it was."""
        for timer in self._timers.expired(self._pid):
            worker = worker_above(timer.process.pid, self._workers)
            if worker is not None:
                whose = "" if worker == timer.process.pid else f" of process {timer.process.pid}"
                self._expired[worker] = f"{timer.scope}{whose}"

    def _begin_sweep(self, message: Message) -> None:
        """Begin to end all of a round, or what those have left that do not stay."""
        keeps = message.get("keeps")
        if keeps:
            dropped = (pid for pid, job in self._workers.items() if job.local_rank not in keeps)
            self._unswept.update(dropped)
            self._sweep = Sweep(message, self._pid, self._spared)
            return
        if keeps is None:
            self._note_stop()
        self._later.note_stop()
        self._stores.drop()
        self._timers.clear()
        self._sweep = Sweep(message, self._pid, lambda: {self._stores.pid})

    def _spared(self) -> list[int]:
        """Return the children but those that the workers have left which are to be swept.

        Each worker is a session. What has begun another one is ended with the last of the workers.
        """
        below = ((pid, processes.session(pid)) for pid in proc.children(self._pid))
        return [pid for pid, session in below if self._unswept.isdisjoint({pid, session})]

    def _keep_fence(self) -> None:
        """Kill all workers when the agent has not moved the fence in time.

        It may be suspended, or cut off from the store: the other nodes start a round without them.
        A worker that an old plan starts after the fence has passed ends at once, too.
        """
        late = time.monotonic() - self._fence
        if late < 0 or not self._workers or self._sweep is not None:
            return
        self._note_stop()
        self._send({"op": "fenced", "late": late})
        order = {"round": FENCED, "signum": 0, "grace": 0.0, "deadline": 10.0}
        self._sweep = Sweep(order, self._pid, lambda: {self._stores.pid})

    def _fence_due(self) -> float:
        """Return when to look at the fence again."""
        return self._fence if self._workers and self._sweep is None else math.inf

    def _note_stop(self) -> None:
        """Report workers that have ended by themselves until now; later ones were sent a signal."""
        self._reap()
        self._later.note_stop()
        self._stopped = set(self._workers)

    def _collect(self) -> None:
        """Reap what has ended, and take the sweep one step on."""
        self._reap()
        if self._sweep is not None and self._sweep.step():
            self._send(self._sweep.outcome())
            self._sweep, self._unswept = None, set()

    def _reap(self) -> None:
        """Free what has ended and report the workers among it."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == self._stores.pid:
                self._stores.on_host_end(os.waitstatus_to_exitcode(status))
            elif pid in self._workers:
                self._later.note_end(pid)
                found = self._exit(pid, os.waitstatus_to_exitcode(status))
                self._send({"op": "exited", **found._asdict()})

    def _exit(self, pid: int, exitcode: int) -> Exit:
        job, stopped = self._workers.pop(pid), pid in self._stopped
        self._stopped.discard(pid)
        self._unswept.add(pid)
        return Exit(
            round=job.round,
            rank=job.rank,
            local_rank=job.local_rank,
            pid=pid,
            exitcode=exitcode,
            at=time.monotonic(),
            stopped=stopped,
            timer=self._expired.pop(pid, ""),
        )

    def _send(self, message: Message) -> None:
        try:
            self._agent.send(message)
        except (BrokenPipeError, ConnectionResetError):
            self._end()

    def _drain_wakeups(self) -> None:
        try:
            while numbers := os.read(self._wake_read, 4096):
                for signum in ANNOUNCED.keys() & numbers:
                    self._later.note_import(signum)
        except BlockingIOError:
            return

    def _forget_temp(self) -> None:
        """Remove the run's directory for temporary files if a killed agent has left it empty."""
        if self._temp is None:
            return
        try:
            for name in os.listdir(self._temp):
                if name.startswith(env.CACHE_PREFIX):
                    os.unlink(os.path.join(self._temp, name))  # a link, if it is elaunch's
            os.rmdir(self._temp)
        except OSError:  # it is not empty, and then not ours to remove; or it is gone
            return

    def _end(self) -> NoReturn:
        """Leave nothing behind: the agent has ended, so everything below must."""
        last = {"round": -1, "signum": 0, "grace": 0.0, "deadline": 5.0}
        sweep = Sweep(last, self._pid, tuple)
        while not sweep.step():
            is_readable(self._wake_read, 0.01)
            self._drain_wakeups()
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                continue
        self._forget_temp()
        os._exit(0)
