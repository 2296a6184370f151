"""Checks that need several settings or the machine, before anything is started; and remarks.

A check raises ``UsageError`` with the flag, the value, the reason and the fix; or returns, perhaps
with notices. Checks that need torch (how many GPUs there are) are left to the agent; those of
checkpoints are in ``checkpoint.py``, those of the command in ``command.py``.

Remarks are about flags that the table says have no effect, and about likely mistakes: one line
each. Only what stands on the command line or in the job file is remarked on; a variable that a
cluster sets for every job is not.
"""

from __future__ import annotations

import math
import os
import signal
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from elaunch import env, hosts
from elaunch.config import checkpoint, endpoints, files, values
from elaunch.config.command import Command
from elaunch.config.flags import table
from elaunch.config.flags.flag import (
    ALONE,
    ALWAYS,
    FRESH_PORT,
    MASTER_KNOWN,
    NOBODY_JOINS,
    NODE_0,
    ON_ONE_NODE,
    WITH_ENDPOINT,
    WITH_PROGRAM,
    WITH_RUN_PATH,
    WITH_SPAWN,
    WITHOUT_DIR,
    WITHOUT_RESTARTS,
    Answers,
)
from elaunch.config.place import MeetingPlace
from elaunch.config.rendezvous import RendezvousSettings
from elaunch.config.values import Moment

NO_FILES = "/dev/null"
SLURM_END: Final = "SLURM_JOB_END_TIME"
DEFAULT_LOGS_SPECS = "default"
"""Torch's own entry point in torchrun.logs_specs: the log files that there are without the flag."""


def directory(answers: Answers, cwd: Path) -> Path:
    """Return the directory that relative paths start from: --workdir, or the current one."""
    if not answers["workdir"]:
        return cwd
    path = files.absolute(answers["workdir"], cwd)
    if why := files.problem(path):
        raise answers.fault("workdir", why + files.near_file(path))
    if not path.is_dir():
        raise answers.fault("workdir", "is not a directory")
    if not os.access(path, os.X_OK):
        raise answers.fault("workdir", "may not be entered by this user")
    return path


def log_dir(answers: Answers, start: Path) -> str | None:
    """Return the absolute log directory; None for the run directory, /dev/null for no files."""
    raw = answers["log-dir"]
    if not raw or raw == NO_FILES:
        return raw or None
    path = files.absolute(raw, start)
    checkpoint.writable_directory(answers, "log-dir", path)
    return str(path)


def timer_file(answers: Answers, start: Path) -> Path | None:
    """Return the absolute path of the timers' named pipe; None where elaunch chooses it."""
    if not answers["file-timer"] or not answers["timer-file"]:
        return None
    path = files.absolute(answers["timer-file"], start)
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        checkpoint.writable_directory(answers, "timer-file", path.parent)
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


def preempt_at(answers: Answers, environ: Mapping[str, str]) -> Moment | None:
    """Return when the workers are to be asked to save and to end: ``after`` or ``at`` is set."""
    given: Moment | None = answers["preempt-at"]
    if given is None or given.after is not None:
        return given
    try:
        return replace(given, at=resolved(given, environ))
    except ValueError as error:
        raise answers.fault("preempt-at", str(error)) from None


def counted(answers: Answers, python: str) -> None:
    """Refuse a device that no torch knows, unless a plug-in of torch's may have named it."""
    word, known = answers["nproc-per-node"], values.DEVICES + values.OTHER_DEVICES
    if word.isdigit() or word in known or python != sys.executable:
        return
    from importlib import metadata  # takes 20 ms

    if not metadata.entry_points(group="torch.backends"):
        raise answers.fault("nproc-per-node", "is neither a number nor a device to count")


def devices(answers: Answers, environ: Mapping[str, str]) -> None:
    """Check that --virtual-local-rank has a GPU for each worker."""
    nproc = answers["nproc-per-node"]
    if answers["virtual-local-rank"] and nproc.isdigit():
        variable = env.visible_devices(environ)
        named = environ.get(variable)
        count = installed_gpus() if named is None else len(env.named_devices(named))
        known = named is not None or count > 0
        if known and count < int(nproc):
            what = "this machine" if named is None else f"{variable}={named!r}"
            raise answers.fault(
                "virtual-local-rank",
                f"gives each of {nproc} workers a GPU, but {what} has {count}",
                "lower --nproc-per-node or name more devices",
            )


def master(answers: Answers, place: MeetingPlace) -> list[str]:
    """Check that the workers' store can be where it was asked to be; return notices."""
    notices = []
    addr = place.master_addr
    flag = "rdzv-endpoint" if place.backend == "static" else "master-addr"
    if not (place.backend == "static" and answers["rdzv-endpoint"]):
        flag = "master-addr" if answers["master-addr"] else "local-addr"
    if addr and addr != hosts.LOOPBACK:
        if not endpoints.addresses(addr):
            unknown = "does not resolve to an address"
            raise answers.fault(flag, unknown, "name this machine", "E-HOST-NAME")
        if not endpoints.is_this_machine(addr):
            notices.append(
                f"--{flag}: {addr} is not an address of this machine; workers reach their store "
                "only if it leads back here"
            )
    if place.master_port:
        why = endpoints.why_not_free(addr or hosts.LOOPBACK, place.master_port)
        if why:
            flag = "rdzv-endpoint" if answers["rdzv-endpoint"] else "master-port"
            what = f"port {place.master_port} {why}" if flag == "rdzv-endpoint" else why
            fix = "take another port, or leave it out for a free one"
            what = what if flag == "master-port" else f"cannot be used: {what}"
            raise answers.fault(flag, what, fix, "E-PORT-IN-USE")
    return notices


def hosting(answers: Answers, meet: RendezvousSettings) -> None:
    """Check that node 0 of the static backend can have its port.

    The port of the c10d backend may be taken by another agent of this very job.
    """
    host, port = meet.endpoints[0]
    if meet.backend == "static" and meet.is_host:
        why = endpoints.why_not_free(host, port)
        if why:
            flag = "rdzv-endpoint" if answers["rdzv-endpoint"] else "master-port"
            what = f"cannot be used: port {port} {why}"
            raise answers.fault(flag, what, "take another port on all nodes", "E-PORT-IN-USE")


def servers(answers: Answers, alone: bool) -> None:
    """Check that the agent can have the ports on which it is asked to answer.

    Of several nodes only the one that is node 0 in the first round serves pages: it takes any free
    port where it cannot have that one.
    """
    for flag in ("metrics-port", "dashboard") if alone else ("metrics-port",):
        host, port = answers[flag] or ("", None)
        why = endpoints.why_not_served(host, port) if port else None
        if why:
            reason, remedy, code = why
            raise answers.fault(flag, reason, remedy, code)


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


def resolved(given: Moment, environ: Mapping[str, str]) -> float:
    """Return the moment in seconds since the epoch; ValueError if it is unknown or is over."""
    now = time.time()
    if given.after is not None:
        return now + given.after
    at = given.at if given.before_end is None else _slurm_end(environ) - given.before_end
    assert at is not None  # one of the three is set
    if at <= now:
        raise ValueError(f"was {now - at:.0f} s ago")
    return at


def _slurm_end(environ: Mapping[str, str]) -> float:
    text = environ.get(SLURM_END, "")
    if not text:
        raise ValueError(
            f"needs the variable {SLURM_END}, which Slurm 22.05 and later sets in a job"
        )
    try:
        end = float(text)
    except ValueError:
        end = math.nan
    if not math.isfinite(end):
        raise ValueError(f"needs {SLURM_END} in seconds, and it is {text!r}")
    return end


def remarks(
    answers: Answers, command: Command, place: MeetingPlace, environ: Mapping[str, str]
) -> list[str]:
    """Return the remarks on these settings."""
    return [
        *_idle(answers, command, place),
        *place.notices,
        *_from_the_beginning(answers),
        *_behind(command),
        *_gpus(answers, environ),
        *_unknown_variables(environ),
    ]


def _idle(answers: Answers, command: Command, place: MeetingPlace) -> Iterator[str]:
    """Yield a remark on each flag that the table says has no effect here."""
    alone, static, low_high = not place.endpoints, place.backend == "static", answers["nnodes"]
    holds = {
        ALWAYS: True,
        ON_ONE_NODE: low_high[1] == 1 or alone,
        ALONE: alone,
        NOBODY_JOINS: alone and low_high[1] > 1,
        FRESH_PORT: not static,
        NODE_0: not static and not alone,
        WITH_ENDPOINT: static and answers["rdzv-endpoint"],
        MASTER_KNOWN: alone and (static or answers["master-addr"]),
        WITH_PROGRAM: command.mode == "command",
        WITH_RUN_PATH: answers["run-path"],
        WITH_SPAWN: answers["start-method"] == "spawn",
        WITHOUT_RESTARTS: not answers["max-restarts"],
        WITHOUT_DIR: not answers["checkpoint-dir"],
    }
    for flag in table.FLAGS:
        when = next((when for when in flag.idle if holds[when]), None)
        if when is not None and answers.said(flag.name) and answers[flag.name]:
            shown = f"--{flag.name} has no effect {when}".rstrip()
            yield f"{shown}: {flag.idle[when]}" if flag.idle[when] else shown


def _from_the_beginning(answers: Answers) -> Iterator[str]:
    """Remark on restarts that resume from nothing."""
    most = answers["max-restarts"]
    if most and answers.said("max-restarts") and not answers["checkpoint-dir"]:
        yield (
            f"--max-restarts {most} without --checkpoint-dir: a restart runs the script from its "
            "beginning, unless the script itself finds its checkpoint"
        )


def _behind(command: Command) -> Iterator[str]:
    """Remark on a launcher's flag that stands behind the script, which gets it there."""
    launches = ("nproc", "nnodes", "node-rank", "rdzv-", "max-restarts", "standalone")
    for word in command.args if command.mode in ("script", "module") else ():
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name[2:].startswith(launches) and name[2:] in _NAMES:
            yield (
                f"{word} stands after the script, so {command.shown} gets it; flags of elaunch "
                "come before the script"
            )
            return


_NAMES: Final = frozenset(name for flag in table.FLAGS for name in (flag.name, *flag.aliases))


def _gpus(answers: Answers, environ: Mapping[str, str]) -> Iterator[str]:
    """Remark on workers that outnumber the GPUs; on CPUs (gloo) that is legitimate."""
    count, nproc = _visible_gpus(environ), answers["nproc-per-node"]
    if count and nproc.isdigit() and int(nproc) > count:
        yield (
            f"--nproc-per-node {nproc}: {nproc} workers share {count} visible GPU"
            f"{'s' * (count > 1)}; a script that takes cuda:LOCAL_RANK fails. For a job on CPUs "
            "set CUDA_VISIBLE_DEVICES= (empty)"
        )


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a notice for each ELAUNCH_ or PET_ variable that is nearly the name of a flag's."""
    known = {name for flag in table.TABLE.values() for name in flag.environment}
    known |= {table.ETCD_USER, table.ETCD_PASSWORD, env.CHECKPOINT_KEEP}
    notices = []
    for name in sorted(environ):
        if name in known or not name.startswith(("ELAUNCH_", "PET_")):
            continue
        near = values.nearest(name, known, cutoff=0.9)
        if near:
            notices.append(f"the variable {name} has no effect; did you mean {near}?")
    return notices


def _visible_gpus(environ: Mapping[str, str]) -> int:
    """Return how many GPUs workers would see; 0 where there is none or no driver."""
    there = installed_gpus()
    named = environ.get(env.VISIBLE_DEVICES)
    return there if named is None else min(there, len(env.named_devices(named)))


def installed_gpus() -> int:
    """Return how many GPUs the NVIDIA driver shows to this process, without torch.

    The driver's own list, or the device files where a container hides it. ``--nproc-per-node gpu``
    counts by torch instead, in a process of its own (elaunch.server.devices).
    """
    try:
        listed = len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:  # no driver, or a container that hides this directory
        listed = 0
    return listed or sum(
        name[6:].isdigit() for name in os.listdir("/dev") if name.startswith("nvidia")
    )
