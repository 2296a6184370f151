"""The worker group: everything that one round's workers are started with and ended by.

It owns the server, the log pump and the listening socket of the workers' store. It decides nothing:
the loop gives the orders, and what happens comes back as events from the server.
"""

from __future__ import annotations

import hmac
import logging
import os
import resource
import string
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from signal import Signals

from elaunch import env
from elaunch.agent.children import Reaper, title_room
from elaunch.agent.context import RunContext
from elaunch.agent.logs import files
from elaunch.agent.logs.pump import LogPump
from elaunch.agent.patience import bounded
from elaunch.agent.policy import events
from elaunch.agent.policy.state import Phase
from elaunch.agent.policy.turn import Round, Turn
from elaunch.agent.workers.network import StoreEndpoint, interface_variables
from elaunch.agent.workers.server import ServerPlan, WorkerServer
from elaunch.agent.workers.tempdir import RunTemp, compiler_caches, remove_torn
from elaunch.checkpoint.search.locations import fill_placeholders
from elaunch.config import Settings
from elaunch.errors import UsageError
from elaunch.runs.directory import RunDir
from elaunch.server import processes

FILES_PER_WORKER = 6
FILES_BESIDE = 64
"""Open files of the agent: four ends of pipes and two log files for each worker, while a round
starts, and its own. It raises its soft limit to the hard one; the server gives each worker the
limits that elaunch was started with."""

FLUSH_TIMEOUT = 2.0
"""Seconds for the log pump to read what dead workers left in their pipes."""

log = logging.getLogger("elaunch")


class WorkerGroup:
    """Owns what the workers of all rounds are started with; ``nproc`` workers per round."""

    def __init__(self, context: RunContext, pump: LogPump) -> None:
        settings = context.settings
        self._context = context
        self._settings = settings
        self._pump = pump
        self.run_dir = context.run_dir.path
        self.environ = context.environ
        """The variables that all workers have in common, from :meth:`open` on."""
        self.own_addr = _own_addr(settings)
        """Where the other nodes reach this one; None in a job of one node."""
        self._nproc = 0
        self._advertised = ""
        self._key = os.urandom(32)
        self.secret = None if settings.rendezvous is None else settings.rendezvous.secret
        """The secret of this job's agents; it may be settled when the store was opened."""
        self.compiles = False
        """Whether a server here has imported what compiling takes, against no script's settings."""
        self.reaper = Reaper()
        self._open_files = processes.raise_open_files()
        self._endpoint = _endpoint(settings, self.own_addr)
        self.files_root = context.log_root or context.run_dir.logs
        """Where the workers leave error records and stacks."""
        self._forks = settings.start_method == "forkserver" and settings.mode != "command"
        self._temp: RunTemp | None = None
        self._cache_cleaned = 0.0
        self._timers: Path | None = None
        self._server_environ = self.environ
        self.server = self._new_server()

    def open(self) -> None:
        """Make what workers find in the file system, and bind their store's socket.

        Raises UsageError where a port is in use, or no pipe can be made for timers.
        """
        settings, variables = self._settings, dict(self.environ)
        try:
            self._temp = RunTemp(settings.tmp, self.environ)
            variables |= self._temp.variables
        except OSError as error:
            log.warning(
                "no directory for temporary files can be made: %s; the workers share one", error
            )
        if settings.file_timer:
            self._timers = _make_timers_pipe(settings, self._context.run_dir)
            variables[env.TIMER_FILE] = str(self._timers)
        self.environ = variables
        self.open_endpoint()

    def _new_server(self) -> WorkerServer:
        settings = self._settings
        plan = ServerPlan(
            run_id=settings.run_id,
            interpreter=settings.interpreter,
            start="fork" if self._forks else "exec",
            preload=_preloaded(settings, later=False),
            later=_preloaded(settings, later=True),
            import_path=_import_path(settings),
            open_files=self._open_files,
            title_room=title_room(settings),
            environ=self._server_environ,
            temp=None if self._temp is None else self._temp.path,
            timer_file=None if self._timers is None else str(self._timers),
            numa_binding=settings.numa_binding,
            nproc=self._nproc,
        )
        return WorkerServer(plan, self._context.post, self.reaper)

    def prepare(self, nproc: int | None) -> None:
        """Start the server for so many workers; None: it counts them first (DevicesCounted).

        It imports torch with as many threads as a worker is to have.
        """
        self._nproc = nproc or 0
        check_open_files(self._nproc)
        threads = env.default_omp_threads(self.environ, nproc or 2)
        self._server_environ = {**self.environ, **threads}
        self._start_server()
        self._clean_cache()

    def _clean_cache(self) -> None:
        """Remove compiled code that is cut short; after the first time what was written since."""
        since, self._cache_cleaned = self._cache_cleaned, time.time()
        caches = compiler_caches(self.environ)
        clean, none = partial(remove_torn, caches, since), list[Path]()
        what = "compiled code is not looked through for what is cut short"
        for path in bounded(clean, none, what, caches["cache"]):
            log.warning("removed %s: its compiler was killed before it was whole", path)

    def _settle(self, nproc: int) -> None:
        """Set the number of workers that the server counted.

        A server that has imported torch with another number of threads than a worker is to have is
        replaced.
        """
        threads = env.default_omp_threads(self.environ, nproc)
        if self._server_environ != {**self.environ, **threads}:
            self.server.close()
            self.prepare(nproc)
            return
        self._nproc = nproc
        check_open_files(nproc)

    def _start_server(self) -> None:
        settings = self._settings
        self.server = self._new_server()
        self.server.start()
        if not self._nproc:
            kind, interpreter = settings.nproc_per_node, settings.interpreter
            self.server.send({"op": "count_devices", "kind": kind, "interpreter": interpreter})

    def spawn_from_now_on(self) -> None:
        """Replace the server by one that imports nothing; workers are plain processes then."""
        self._forks = False
        self.replace_server()

    def replace_server(self) -> None:
        """End the server, if it has not ended, and start another; no worker runs."""
        self.server.close()
        self._start_server()
        self.between_rounds()

    def open_endpoint(self) -> int:
        """Bind the store's socket now, so that a port in use is an error before anything starts.

        Returns the port, for the nodes that have to know it before the next round.
        """
        self._endpoint.open()
        return self._endpoint.port

    def advertise(self, text: str) -> None:
        """Have a store hosted before the first round, in which the other agents read ``text``.

        From now on each round's store has it: with the static backend the workers' port is the one
        address that all agents know.
        """
        self._advertised = text
        self._host_store(-1)

    def between_rounds(self) -> None:
        """Have the text of :meth:`advertise`, if any, found by agents that come meanwhile."""
        if self._advertised:
            self._host_store(-1)

    def _host_store(self, round_number: int) -> None:
        listening = self._endpoint.open()
        store = {"op": "store", "round": round_number, "host": self._endpoint.host}
        store |= {"fixed": self._endpoint.fixed, "identity": self._advertised}
        self.server.send(store, [listening])
        if round_number >= 0:
            self._endpoint.note_use()

    def fence(self, until: float) -> None:
        """Have the server kill all workers when ``until`` (monotonic seconds) has passed.

        Each call replaces the last one. It holds also while this process is suspended.
        """
        self.server.send({"op": "fence", "until": until})

    def start(self, start: Round) -> dict[int, dict[str, str]]:
        """Start the workers of a round; a server that was lost is replaced first.

        Returns the variables of those that were kept, by local rank.
        """
        if not self.server.pid:
            self._start_server()
        if start.round and (self.compiles or not self._forks):
            self._clean_cache()
        settings = self._settings
        if start.place.node_rank == 0:
            self._host_store(start.round)
        facts = self._facts(start)
        sockets = self._sockets(start.place)
        args = fill_placeholders(settings.args, start.checkpoint or settings.init_from)
        ranks = {local_rank: start.first_rank + local_rank for local_rank in range(self._nproc)}
        channels = self._pump.open_round(start.round, ranks, start.kept.keys())
        if self._context.log_root is None:
            root = self.files_root
            make = partial(files.make_directories, root, start.round, list(ranks))
            bounded(make, None, f"cannot make a directory for error files in {root}", root)
        entering = dict[int, dict[str, str]]()
        for local_rank in ranks:
            error_file = str(self._error_file(start.round, local_rank))
            variables = env.worker_environment(facts, local_rank, error_file, self._server_environ)
            variables |= sockets
            if local_rank in start.kept:
                entering[local_rank] = variables
                continue
            if start.present:
                variables[env.PRESENT] = ",".join(map(str, start.present))
            if settings.hang_timeout is not None:
                variables[env.STACKS_FILE] = str(self.stacks_file(start.round, local_rank))
            job = {
                "round": start.round,
                "rank": ranks[local_rank],
                "local_rank": local_rank,
                "mode": settings.mode,
                "entrypoint": settings.entrypoint,
                "args": [_with_local_rank(arg, local_rank) for arg in args],
                "interpreter": settings.interpreter,
                "env": variables,
            }
            self.server.start_worker(job, *channels[local_rank])
        return entering

    def _facts(self, start: Round) -> env.RoundFacts:
        settings = self._settings
        checkpoint = start.resumes_from or (None if start.present else settings.init_from)
        place, plan = start.place, start.plan
        master_addr, master_port = self._endpoint.host, self._endpoint.port
        if plan is None:
            place = env.only_node(master_addr, self._nproc)
        else:
            master_addr, master_port = plan.master_addr, plan.master_port
        return settings.worker_facts()._replace(
            round=start.round,
            restarts=start.restarts,
            reason=start.reason,
            local_world_size=self._nproc,
            place=place,
            master_addr=master_addr,
            master_port=master_port,
            agent_socket=str(self._context.run_dir.socket),
            resume_from="" if checkpoint is None else str(checkpoint.path),
            resume_step="" if checkpoint is None else str(checkpoint.step),
            # "1" makes rank 0 try to host and torch's own fallback make it a client where that
            # address is taken, as the launcher's is; a private store of the script, or of what it
            # starts, works with it. In a forked worker elaunch.server.torchfix spares the
            # attempt.
            use_agent_store="1",
            channel_key=self._channel_key(start),
            resume_uuid="" if checkpoint is None else checkpoint.uuid,
        )

    def _sockets(self, place: env.NodePlace) -> dict[str, str]:
        """Return what gloo and NCCL go by on several nodes."""
        if place.nodes == 1:
            return {}
        others = [addr for node, addr in enumerate(place.addrs) if node != place.node_rank]
        return interface_variables(place.addrs[place.node_rank], others, self._server_environ)

    def _channel_key(self, start: Round) -> str:
        """Return the key by which the round's workers know each other; "" if none can be shared.

        Nodes share nothing that others could not read but the secret of --rdzv-secret-file, of
        mpirun or by MUNGE, and, behind a password of etcd, the job's incarnation id.
        """
        rendezvous = self._settings.rendezvous
        if rendezvous is None:
            return self._key.hex()
        secret = self.secret
        if secret is None and rendezvous.etcd.password is not None and start.plan is not None:
            secret = start.plan.job.encode()
        if not secret:
            return ""
        whose = f"workers of {self._settings.run_id}, round {start.round}".encode()
        return hmac.new(secret, whose, "sha256").hexdigest()

    def _error_file(self, round_number: int, local_rank: int) -> Path:
        attempt = files.round_directory(self.files_root, round_number).absolute()
        return attempt / str(local_rank) / "error.json"

    def stacks_file(self, round_number: int, local_rank: int) -> Path:
        """Return where a worker writes its stacks, if it is asked to."""
        return self._error_file(round_number, local_rank).with_name("stacks.txt")

    def error_file(self, round_number: int, local_rank: int) -> str | None:
        """Return the path of a worker's error record if it wrote one."""
        path = self._error_file(round_number, local_rank)
        there = bounded(path.exists, False, f"cannot look for {path}", self.files_root)
        return str(path) if there else None

    def send_signal(self, signum: Signals, stops: bool, shielded: Sequence[int] = ()) -> None:
        """Signal the worker processes; also their groups where a worker is any command.

        ``stops`` says that the workers are meant to end by it; ``shielded`` are the local ranks of
        those in which SIGTERM does nothing.

        A Python worker's helpers (DataLoader workers) are its own to end; a command is often a
        shell around the program that has to save.
        """
        group = self._settings.mode == "command"
        order = {"op": "signal", "signum": int(signum), "group": group, "stops": stops}
        self.server.send({**order, "shielded": shielded})

    def see(self, turn: Turn) -> None:
        """Note how many workers were counted; after a round, wait for all that its tree wrote."""
        if isinstance(turn.event, events.TreeGone):
            self._pump.finish_round(FLUSH_TIMEOUT, turn.event.kept)
        elif isinstance(turn.event, events.DevicesCounted) and turn.before.phase is Phase.STARTING:
            self._settle(turn.before.limits.nproc)
        elif isinstance(turn.event, events.ServerWarmed):
            self.compiles = self.compiles or turn.event.compiles

    def close(self) -> None:
        """End the server with all that is below it, and let go of what the workers found here."""
        self.server.close()
        self._endpoint.close()
        if self._timers is not None:
            self._timers.unlink(missing_ok=True)
        if self._temp is not None and (left := self._temp.close()) is not None:
            log.warning("the workers left files in their TMPDIR, %s", left)


def _own_addr(settings: Settings) -> str | None:
    if settings.rendezvous is None:
        return None
    from elaunch.config.rendezvous import own_address

    return own_address(settings.rendezvous)


def _endpoint(settings: Settings, own_addr: str | None) -> StoreEndpoint:
    rendezvous = settings.rendezvous
    if rendezvous is None or own_addr is None:
        return StoreEndpoint(settings.master_addr, settings.master_port)
    if rendezvous.backend == "static" and rendezvous.is_host:
        return StoreEndpoint(*rendezvous.endpoints[0], for_nodes=True)
    return StoreEndpoint(own_addr, None, for_nodes=True)


def _make_timers_pipe(settings: Settings, run_dir: RunDir) -> Path:
    """Make the pipe for torch.distributed.elastic.timer; raises UsageError."""
    path = settings.timer_file or run_dir.timers
    try:
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
    except OSError as error:
        raise UsageError(
            f"{env.TIMER_FILE}: no named pipe can be made at {str(path)!r}: {error.strerror}; "
            "name a path on a local file system"
        ) from error
    return path


def _preloaded(settings: Settings, later: bool) -> tuple[str, ...]:
    """Return the modules that the server imports at its start, or later (``+module``)."""
    return tuple(name.lstrip("+") for name in settings.preload if name.startswith("+") is later)


def _import_path(settings: Settings) -> str | None:
    """Return what a worker has first on ``sys.path``: its own modules may be preloaded."""
    if settings.mode == "module":
        return os.getcwd()
    if settings.mode == "script" and not os.path.isdir(settings.entrypoint):
        return os.path.dirname(os.path.realpath(settings.entrypoint))
    return None


def _with_local_rank(arg: str, local_rank: int) -> str:
    """Fill ``${local_rank}`` as torchrun does; ``$$`` becomes ``$``, as there."""
    return string.Template(arg).safe_substitute(local_rank=local_rank)


def check_open_files(nproc: int) -> None:
    """Raise UsageError where ``nproc`` workers need more open files than the hard limit allows."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_PER_WORKER * nproc + FILES_BESIDE
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UsageError(
            f"--nproc-per-node {nproc}: elaunch needs {needed} open files for that, and the hard "
            f"limit is {limit}; raise it (ulimit -Hn {needed}) or start fewer workers"
        )
