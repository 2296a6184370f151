"""Checks of the settings against the machine, before anything is started.

Every function here checks one part of the settings and raises ``UsageError`` with the flag, the
value, the reason and the fix; or returns, perhaps with notices. Checks that need torch (how many
GPUs there are) are left to the agent.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from elaunch import env
from elaunch.config import gpus, modules, moments, paths
from elaunch.config.entrypoint import Command
from elaunch.config.flags import values
from elaunch.config.flags.answers import Answers
from elaunch.config.meeting import ports, topology
from elaunch.config.meeting.rendezvous import RendezvousSettings
from elaunch.errors import UsageError

NO_FILES = "/dev/null"
DEFAULT_LOGS_SPECS = "default"
"""Torch's own entry point in torchrun.logs_specs: the log files that there are without the flag."""


def directory(answers: Answers, cwd: Path) -> Path:
    """Return the directory that relative paths start from: --workdir, or the current one."""
    if not answers["workdir"]:
        return cwd
    path = paths.absolute(answers["workdir"], cwd)
    if why := paths.problem(path):
        raise answers.fault("workdir", why + near_file(path))
    if not path.is_dir():
        raise answers.fault("workdir", "is not a directory")
    if not os.access(path, os.X_OK):
        raise answers.fault("workdir", "may not be entered by this user")
    return path


def command(found: Command, start: Path, interpreter: str, environ: Mapping[str, str]) -> None:
    """Check that the script, the module or the program can be started."""
    if found.mode == "module":
        _module(found, start, interpreter, environ)
    elif found.mode == "command":
        _program(found, start, environ)
    else:
        _script(found, start)


def _script(found: Command, start: Path) -> None:
    if found.entrypoint == "-":
        raise UsageError("script '-': several workers cannot read one stdin; save it to a file")
    path = start / found.entrypoint
    if why := paths.problem(path):
        raise UsageError(f"script {found.shown} {why}{_script_hint(found, path)}")
    if path.is_dir():
        if not os.path.isfile(path / "__main__.py"):
            raise UsageError(
                f"script {found.shown} is a directory without a __main__.py; name a file in it"
            )
        path = path / "__main__.py"
    if not os.access(path, os.R_OK):
        raise UsageError(f"script {found.shown} may not be read by this user")


def _script_hint(found: Command, path: Path) -> str:
    if found.entrypoint.startswith("-"):
        return "; flags come before the script"
    near = near_file(path)
    if not near and shutil.which(found.entrypoint):
        return "; to start a program that is not a Python script, use --no-python"
    if not near and "/" not in found.entrypoint and not found.entrypoint.endswith(".py"):
        return "; to start a module by its name, use -m"
    return near


def near_file(path: Path) -> str:
    """Return a "did you mean" with the most similar name in the path's directory."""
    try:
        return values.did_you_mean(path.name, os.listdir(path.parent))
    except (FileNotFoundError, NotADirectoryError):
        return f": there is no directory {str(path.parent)!r}"
    except OSError:
        return ""


def _module(found: Command, start: Path, interpreter: str, environ: Mapping[str, str]) -> None:
    if interpreter != sys.executable:
        return  # another Python has other modules, and only it knows them
    why = modules.why_not_runnable(found.entrypoint, modules.worker_path(start, environ))
    if why:
        raise UsageError(f"--module: {found.shown} {why}")


def _program(found: Command, start: Path, environ: Mapping[str, str]) -> None:
    name = found.entrypoint
    if "/" not in name:
        if not shutil.which(name, path=environ.get("PATH")):
            hint = near_file(start / name) if os.path.isfile(start / name) else ""
            hint = f"; for the file in {str(start)!r} write './{name}'" if hint else ""
            raise UsageError(f"--no-python: the program {found.shown} is not on PATH{hint}")
        return
    path = start / name
    if why := paths.problem(path):
        raise UsageError(f"--no-python: {found.shown} {why}{near_file(path)}")
    if path.is_dir() or not os.access(path, os.X_OK):
        raise UsageError(
            f"--no-python: {found.shown} cannot be executed; make it executable (chmod +x), "
            "or leave --no-python out for a Python script"
        )


def interpreter(answers: Answers, found: Command, start: Path) -> str:
    """Return the Python of the workers: the job file's, PYTHON_EXEC, or the agent's own."""
    name = found.interpreter or answers["interpreter"]
    if not name:
        return sys.executable
    path = shutil.which(str(start / name) if "/" in name else name)
    if path is None:
        origin = "entrypoint" if found.interpreter else "PYTHON_EXEC"
        raise UsageError(f"{origin}: {name!r} is not a program that can be executed")
    return path


def preload(answers: Answers, start: Path, python: str, environ: Mapping[str, str]) -> None:
    """Check that the modules which the user wants in the fork server exist."""
    if not answers.is_set("preload") or python != sys.executable:
        return
    for name in answers["preload"]:
        why = modules.why_not_found(name.removeprefix("+"), modules.worker_path(start, environ))
        if why:
            raise answers.fault("preload", f"names {name}, which {why}")


def log_dir(answers: Answers, start: Path) -> str | None:
    """Return the absolute log directory; None for the run directory, /dev/null for no files."""
    raw = answers["log-dir"]
    if not raw or raw == NO_FILES:
        return raw or None
    path = paths.absolute(raw, start)
    writable_directory(answers, "log-dir", path)
    return str(path)


def timer_file(answers: Answers, start: Path) -> Path | None:
    """Return the absolute path of the timers' named pipe; None where elaunch chooses it."""
    if not answers["file-timer"] or not answers["timer-file"]:
        return None
    path = paths.absolute(answers["timer-file"], start)
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        writable_directory(answers, "timer-file", path.parent)
        if not path.parent.is_dir():
            raise answers.fault("timer-file", "is in a directory that does not exist") from None
        return path
    except OSError as error:
        raise answers.fault("timer-file", f"cannot be looked at: {error.strerror}") from None
    if not stat.S_ISFIFO(mode):
        raise answers.fault("timer-file", "is there already, and no named pipe", "remove it")
    if _has_reader(path):
        raise answers.fault(
            "timer-file", "is in use: somebody reads it, another agent perhaps", "name another"
        )
    return path


def _has_reader(pipe: Path) -> bool:
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def writable_directory(answers: Answers, flag: str, path: Path) -> None:
    """Check that the directory of a flag can be written, or made."""
    existing = path
    while (why := paths.problem(existing)) == "does not exist" and existing != existing.parent:
        existing = existing.parent
    if why:
        raise answers.fault(flag, why)
    if not existing.is_dir():
        what = "is a file" if existing == path else f"is below {str(existing)!r}, which is a file"
        raise answers.fault(flag, f"{what}, not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise answers.fault(flag, f"cannot be written: no right to write in {str(existing)!r}")


def signals(answers: Answers) -> tuple[tuple[signal.Signals, ...], tuple[signal.Signals, ...]]:
    """Return (signals that end the job, signals that are only passed on).

    A signal cannot be both. One that ends the job by default and is asked to be only passed on is
    passed on, but for SIGTERM and SIGINT: without them the job could not be stopped.
    """
    handle, forward = answers["signals-to-handle"], answers["forward-signals"]
    if answers.is_set("signals-to-handle") and not handle:
        raise answers.fault("signals-to-handle", "names no signal")
    both = [each for each in forward if each in handle]
    if both and answers.is_set("signals-to-handle"):
        raise answers.fault(
            "forward-signals",
            f"has {both[0].name} in it, which --signals-to-handle has too",
            "a signal either ends the job or is passed on",
        )
    for each in both:
        if each in (signal.SIGTERM, signal.SIGINT):
            raise answers.fault(
                "forward-signals",
                f"has {each.name} in it: the job could no longer be stopped by it",
                "other signals may be forwarded, such as SIGUSR1 and SIGUSR2",
            )
    return tuple(each for each in handle if each not in both), forward


def preempt_signals(
    answers: Answers, others: Sequence[signal.Signals]
) -> tuple[signal.Signals, ...]:
    """Return the signals at which the workers are asked to save and to end.

    By default these are none of ``others``, which end the job or are passed on.
    """
    wanted: tuple[signal.Signals, ...] = answers["preempt-signals"]
    both = [each for each in wanted if each in others]
    if both and answers.is_set("preempt-signals"):
        raise answers.fault(
            "preempt-signals",
            f"has {both[0].name} in it, which ends the job or is forwarded",
            "a signal has one meaning; SIGTERM asks workers to save in any case, if they can",
        )
    return tuple(each for each in wanted if each not in both)


def preempt_at(answers: Answers, environ: Mapping[str, str]) -> float | None:
    """Return when the workers are to be asked to save and to end, in seconds since the epoch."""
    given = answers["preempt-at"]
    if given is None:
        return None
    try:
        return moments.resolved(given, environ)
    except ValueError as error:
        raise answers.fault("preempt-at", str(error)) from None


def devices(answers: Answers, environ: Mapping[str, str]) -> None:
    """Check that --virtual-local-rank has a GPU for each worker; refuse --numa-binding."""
    nproc = answers["nproc-per-node"]
    if answers["virtual-local-rank"] and nproc.isdigit():
        named = environ.get(env.VISIBLE_DEVICES)
        count = gpus.installed() if named is None else len(env.named_devices(named))
        known = named is not None or count > 0
        if known and count < int(nproc):
            what = "this machine" if named is None else f"CUDA_VISIBLE_DEVICES={named!r}"
            raise answers.fault(
                "virtual-local-rank",
                f"gives each of {nproc} workers a GPU, but {what} has {count}",
                "lower --nproc-per-node or name more devices",
            )
    if answers["numa-binding"]:
        raise answers.fault(
            "numa-binding",
            "cannot be done: this version does not bind workers to the CPUs near their GPU",
            "leave it out, or bind in a script of your own that --no-python starts (numactl)",
        )


def master(answers: Answers, meeting: topology.Topology) -> list[str]:
    """Check that the workers' store can be where it was asked to be; return notices."""
    notices = []
    addr = meeting.master_addr
    flag = "rdzv-endpoint" if meeting.backend == "static" else "master-addr"
    if not (meeting.backend == "static" and answers["rdzv-endpoint"]):
        flag = "master-addr" if answers["master-addr"] else "local-addr"
    if addr and addr != topology.LOOPBACK:
        found = topology.addresses(addr)
        if not found:
            raise answers.fault(flag, "does not resolve to an address", "name this machine")
        if not topology.is_this_machine(addr):
            notices.append(
                f"--{flag}: {addr} is not an address of this machine; workers reach their store "
                "only if it leads back here"
            )
    if meeting.master_port:
        why = ports.why_not_free(addr or topology.LOOPBACK, meeting.master_port)
        if why:
            flag = "rdzv-endpoint" if answers["rdzv-endpoint"] else "master-port"
            what = f"port {meeting.master_port} {why}" if flag == "rdzv-endpoint" else why
            fix = "take another port, or leave it out for a free one"
            raise answers.fault(
                flag, what if flag == "master-port" else f"cannot be used: {what}", fix
            )
    return notices


def hosting(answers: Answers, meet: RendezvousSettings) -> list[str]:
    """Check that node 0 of the static backend can have its port; return notices (none).

    The port of the c10d backend may be taken by another agent of this very job.
    """
    host, port = meet.endpoints[0]
    if meet.backend == "static" and meet.is_host:
        why = ports.why_not_free(host, port)
        if why:
            flag = "rdzv-endpoint" if answers["rdzv-endpoint"] else "master-port"
            raise answers.fault(
                flag, f"cannot be used: port {port} {why}", "take another port on all nodes"
            )
    return []


def refused(answers: Answers) -> None:
    """Refuse by name what elaunch does not do."""
    if answers["logs-specs"] not in (None, DEFAULT_LOGS_SPECS):
        raise answers.fault(
            "logs-specs",
            "names a class of the entry point group torchrun.logs_specs, which elaunch cannot use: "
            "such classes extend torch's own log code",
            "leave it out, or say 'default', and use --log-dir, --redirects, --tee and "
            "--duplicate-stdout-filters",
        )
