"""``elastic_launch``, ``LaunchConfig``, ``run`` and ``main`` as torch has them, on elaunch's agent.

A configuration becomes the flags of an ``elaunch run``. What it has that elaunch does not use, or
does not know because torch is newer, is named once, on the log; what torch itself puts in (a
timeout of 900 s) is left out where it means nothing. A program goes to ``elaunch run`` as it is;
one that is this very Python with a script, or with ``-m`` and a module, as that script or module,
so that its workers are forked from a process that has torch.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher import api

from elaunch.env import SCRATCH
from elaunch.proc import own_prefix
from elaunch.torchrun.agentprocess import check, run_agent
from elaunch.torchrun.calls import run_function

TORCHS_TIMEOUT = 900
TORCHS_INTERVAL = 0.1
TORCHS_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""The signals that torch handles up to 2.8, whose configuration has no field for them."""

AS_THEY_ARE = (
    *("nproc_per_node", "role", "max_restarts", "signals_to_handle", "shutdown_timeout"),
    *("event_log_handler", "local_addr", "log_line_prefix_template"),
)
"""Fields of a LaunchConfig that are flags of the same name; an older torch lacks some."""
FIELDS = {
    *AS_THEY_ARE,
    *("min_nodes", "max_nodes", "run_id", "start_method", "monitor_interval", "metrics_cfg"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_configs", "rdzv_timeout", "logs_specs"),
    *("numa_options", "virtual_local_rank"),
    *("duplicate_stdout_filters", "duplicate_stderr_filters"),
}
"""All that have an effect here, or are named where they have none (metrics_cfg)."""

BACKENDS = ("", "static", "c10d", "etcd", "etcd-v2")
"""Those that torch has; one node by itself needs none, and another name is a mistake."""

Entrypoint = Callable[..., Any] | str
_log = logging.getLogger("elaunch")


class _RunDirectory(DefaultLogsSpecs):  # type: ignore[misc]
    """Logs where elaunch keeps them; torch's default makes a directory in /tmp and leaves it."""

    def __init__(self, *streams: Any) -> None:
        super().__init__(os.devnull, *streams)


@dataclasses.dataclass
class LaunchConfig(api.LaunchConfig):  # type: ignore[misc]
    """torch's ``LaunchConfig``, field by field, of the torch that is installed.

    Without ``logs_specs`` the logs are in the run's directory. On one node neither backend nor
    endpoint is needed.
    """

    logs_specs: Any = None

    def __post_init__(self) -> None:
        if self.logs_specs is None:
            self.logs_specs = _RunDirectory()
        super().__post_init__()


class elastic_launch:
    """Launches ``entrypoint`` on this node as ``config`` says, as torch's ``elastic_launch`` does.

    ::

        results = elastic_launch(LaunchConfig(1, 1, nproc_per_node=4), train)(0.1, "data")
        elastic_launch(config, "python")("-u", "train.py", "--lr", "0.1")

    Args:
        config: a LaunchConfig, this module's or torch's own.
        entrypoint: a function, called in each worker, or the name of a program.
        health_check_server: no effect; TORCHELASTIC_HEALTH_CHECK_PORT opens a health check.
    """

    def __init__(
        self,
        config: api.LaunchConfig,
        entrypoint: Entrypoint,
        health_check_server: object | None = None,
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Return what the function returned, by global rank; None of each for a program.

        Blocks until the job has ended. Raises ChildFailedError where workers failed and no restart
        was left, SignalException where a signal ended the job, and ElaunchError for what elaunch
        itself cannot do. Any thread may call it; in the main thread the handlers of
        ``signals_to_handle`` are the call's own while it lasts.
        """
        return launch_agent(self._config, self._entrypoint, args, self._health_check_server)


def launch_agent(
    config: api.LaunchConfig,
    entrypoint: Entrypoint,
    args: Sequence[Any],
    health_check_server: object | None = None,
) -> dict[int, Any]:
    """Do what an ``elastic_launch`` does when it is called."""
    if health_check_server is not None:
        _no_effect("health_check_server", "TORCHELASTIC_HEALTH_CHECK_PORT opens a health check")
    handled = _signals(getattr(config, "signals_to_handle", TORCHS_SIGNALS))
    flags = _flags(config)
    if callable(entrypoint):
        name = getattr(entrypoint, "__name__", type(entrypoint).__name__)
        ended, results = run_function(
            entrypoint,
            args,
            [*flags, f"--name={name}"],
            start_method=str(config.start_method or multiprocessing.get_start_method()),
            handled=handled,
        )
    elif isinstance(entrypoint, str):
        name, words = _program(entrypoint, [str(arg) for arg in args])
        with tempfile.TemporaryDirectory(prefix=own_prefix(SCRATCH)) as place:
            ended = run_agent([*flags, *words], Path(place), handled)
        workers = [] if ended.record is None else ended.record["workers"]
        results = {worker["rank"]: None for worker in workers}
    else:
        raise TypeError(f"entrypoint is a {type(entrypoint).__name__}, not a function or a program")
    check(ended, name)
    return results


def run(args: Any) -> None:
    """Launch what ``parse_args`` returned, as ``torch.distributed.run.run`` does."""
    one_node = torchrun.parse_min_max_nnodes(args.nnodes)[1] == 1
    by_itself = args.rdzv_backend == "static" and not args.rdzv_endpoint
    if args.standalone or (by_itself and args.master_port is None and one_node):
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
        args.rdzv_id = "" if args.rdzv_id == "none" else args.rdzv_id
    if args.master_port is None:
        args.master_port = 29500
    log_dir, args.log_dir = args.log_dir, args.log_dir or os.devnull
    config, command, words = torchrun.config_from_args(args)
    if log_dir is None:
        logs = config.logs_specs
        config.logs_specs = _RunDirectory(logs._redirects, logs._tee, logs._local_ranks_filter)
    launch_agent(config, command, words)


@record  # type: ignore[untyped-decorator, unused-ignore]
def main(args: Sequence[str] | None = None) -> None:
    """Take torchrun's command line, ``sys.argv`` by default, as ``torch.distributed.run.main``.

    Raises what :class:`elastic_launch` raises, and SystemExit for a wrong command line.
    """
    run(torchrun.parse_args(args))


def _program(entrypoint: str, args: list[str]) -> tuple[str, list[str]]:
    """Return the program's name and the words for it; see the module's text."""
    name = next((arg for arg in args if arg[:1] != "-"), "")
    script = args[args[:1] == ["-u"] :]
    if entrypoint == os.environ.get("PYTHON_EXEC", sys.executable) and args[:1] == ["-u"]:
        if script[:1] == ["-m"] and len(script) > 1:
            return name, ["--module=yes", "--", *script[1:]]
        if script and script[0][:1] != "-":
            return name, ["--", *script]
    name = name if entrypoint == sys.executable else entrypoint
    return name, ["--no-python=yes", "--", entrypoint, *args]


def _signals(names: str) -> list[signal.Signals]:
    """Return the signals to forward; a name that is none is an error of ``elaunch run``."""
    known = signal.Signals.__members__
    return [known[name.strip()] for name in names.split(",") if name.strip() in known]


@cache
def _no_effect(name: str, why: str) -> None:
    _log.warning("elaunch: %s has no effect: %s", name, why)


def _flags(config: api.LaunchConfig) -> list[str]:
    """Return the flags of ``elaunch run`` that a configuration means; see FIELDS."""
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    _name_what_has_no_effect(config)
    numa = given.get("numa_options")
    flags = {
        "nnodes": f"{config.min_nodes}:{config.max_nodes}",
        **{name.replace("_", "-"): given.get(name) for name in AS_THEY_ARE},
        "rdzv-id": config.run_id or None,
        "virtual-local-rank": "yes" if given.get("virtual_local_rank") else None,
        "numa-binding": None if numa is None else numa.affinity_mode.value,
        "duplicate-stdout-filters": _texts(given.get("duplicate_stdout_filters")),
        "duplicate-stderr-filters": _texts(given.get("duplicate_stderr_filters")),
        **_meeting(config),
        **_logs(config.logs_specs),
    }
    if config.monitor_interval != TORCHS_INTERVAL:
        flags["monitor-interval"] = config.monitor_interval
    return [f"--{name}={value}" for name, value in flags.items() if value is not None]


def _name_what_has_no_effect(config: api.LaunchConfig) -> None:
    """Name the fields of a newer torch, or of the program's own class, that are set."""
    if config.metrics_cfg:
        _no_effect("metrics_cfg", "the run's record has restarts and failures (elaunch status)")
    if getattr(getattr(config, "numa_options", None), "should_fall_back_if_binding_fails", False):
        name = "NumaOptions.should_fall_back_if_binding_fails"
        _no_effect(name, "what cannot be bound is an error before anything starts")
    for field in dataclasses.fields(config):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if field.name not in FIELDS and getattr(config, field.name) != default:
            _no_effect(f"LaunchConfig.{field.name}", "elaunch does not know it")


def _meeting(config: api.LaunchConfig) -> dict[str, Any]:
    """Return the flags of where the nodes meet; one node without an endpoint is by itself."""
    backend, endpoint = config.rdzv_backend, config.rdzv_endpoint
    one_node = config.max_nodes == 1
    if one_node and endpoint in ("", "localhost:0"):
        return {} if backend in BACKENDS else {"rdzv-backend": backend}
    conf = dict(config.rdzv_configs)
    if conf.get("timeout") == TORCHS_TIMEOUT and backend != "etcd":
        del conf["timeout"]
    if one_node:
        conf.pop("rank", None)
    return {
        "rdzv-backend": None if backend == "static" else backend,
        "rdzv-endpoint": endpoint or None,
        "rdzv-conf": ",".join(f"{key}={value}" for key, value in conf.items()) or None,
    }


def _logs(specs: Any) -> dict[str, Any]:
    """Return the flags of a LogsSpecs: its directory, its streams and its ranks."""
    own = isinstance(specs, _RunDirectory)
    if not own and type(specs).reify is not DefaultLogsSpecs.reify:
        _no_effect(f"{type(specs).__name__}.reify", "elaunch writes the workers' files itself")
    ranks = specs._local_ranks_filter
    return {
        "log-dir": None if own else specs.root_log_dir,
        "redirects": _streams(specs._redirects),
        "tee": _streams(specs._tee),
        "local-ranks-filter": ",".join(map(str, sorted(ranks))) if ranks else None,
    }


def _streams(given: Any) -> str | None:
    """Return streams, or those of each rank, as --redirects has them; None for none."""
    if isinstance(given, Mapping):
        return ",".join(f"{rank}:{int(streams)}" for rank, streams in given.items()) or None
    return str(int(given)) if given else None


def _texts(texts: Sequence[str] | None) -> str | None:
    return ",".join(text.replace(",", ",,") for text in texts) if texts else None
