"""Known causes: from how a worker ended and what it printed to a line or two with the fix.

:func:`explain` is pure. It looks first for a known text (elaunch.agent.failure.causes): in the last
exception, then in the whole traceback, without one in the last lines; only after exit codes 1 and
2, SIGABRT and SIGBUS. Then it looks at the signal, then at the exit code. A cause marked as a
*victim's* is what a worker shows when another rank ended first. :func:`part` is what
``elaunch explain`` says of one cause.
"""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from elaunch.agent.failure.causes import OOM_FIX, TEXTS, Cause
from elaunch.agent.failure.tracebacks import HANDLING, HEADER
from elaunch.endings import Exit, signal_name
from elaunch.errors import StoreError

_NATIVE: Final = "Rerun with PYTHONFAULTHANDLER=1 to see the Python line it was at."
_WIDTH: Final = 100
_REFUSED: Final = "a message of elaunch itself; no worker was started"

_ENDS: Final = (
    Cause(
        "E-OOM-KILLED",
        "Out of memory: the kernel killed {it}.",
        OOM_FIX,
        seen="SIGKILL, and the count of OOM kills of this job's cgroup grew during the round",
    ),
    Cause(
        "E-KILLED",
        "It was killed from outside elaunch: by the OOM killer of the host's kernel (see dmesg), "
        "by the scheduler, or by an operator.",
        ends=("SIGKILL",),
    ),
    Cause(
        "E-TERMINATED",
        "Something other than elaunch asked it to end: scheduler, operator, or the script.",
        ends=("SIGTERM",),
    ),
    Cause(
        "E-INTERRUPTED",
        "Something other than elaunch interrupted it: an operator, or the script.",
        ends=("SIGINT",),
    ),
    Cause(
        "E-HUNG-UP",
        "Something other than elaunch hung it up: the end of a session, or the script.",
        ends=("SIGHUP",),
    ),
    Cause(
        "E-BUS-ERROR",
        "A page of a mapped file could not be had: most often /dev/shm is full, or the file was "
        "cut short, or its disk is full.",
        ends=("SIGBUS",),
    ),
    Cause(
        "E-SEGFAULT",
        "Native code crashed: an extension, a driver, mismatched binaries.",
        _NATIVE,
        ends=("SIGSEGV",),
    ),
    Cause(
        "E-ABORTED",
        "Native code gave up: a C++ exception, a failed check, a broken heap.",
        _NATIVE,
        ends=("SIGABRT",),
    ),
    Cause(
        "E-ILLEGAL-INSTRUCTION",
        "The CPU lacks an instruction that the code uses: a binary built for another CPU.",
        ends=("SIGILL",),
    ),
    Cause("E-DIVISION", "Native code divided an integer by zero.", _NATIVE, ends=("SIGFPE",)),
    Cause(
        "E-FORBIDDEN-CALL",
        "It made a system call that the sandbox (seccomp) forbids.",
        ends=("SIGSYS",),
    ),
    Cause("E-CPU-LIMIT", "Its limit of CPU time is used up; see ulimit -t.", ends=("SIGXCPU",)),
    Cause(
        "E-USER-SIGNAL",
        "The signal came from outside elaunch and the script had no handler for it (yet).",
        "--forward-signals is for scripts that do.",
        ends=("SIGUSR1", "SIGUSR2"),
    ),
    Cause("E-FLUSH", "Python could not flush stdout or stderr at its end.", ends=(120,)),
    Cause(
        "E-NOT-EXECUTABLE",
        "The command was found but cannot be run: it is not executable, or no program.",
        ends=(126,),
    ),
    Cause(
        "E-COMMAND-MISSING",
        "The command was not found, or a library that it needs was not.",
        ends=(127,),
    ),
    Cause(
        "E-TIMER",
        "Its timer {timer} had expired (torch.distributed.elastic.timer), and so it was ended: the "
        "section took longer than timer.expires(after=…) allows.",
        seen="the watchdog of torch.distributed.elastic.timer",
    ),
)

_START: Final = (
    Cause(
        "E-VALUE",
        "A value does not fit its flag.",
        "The message names the value, where it came from (a variable, a line of the job file; else "
        "it is the command line) and what is allowed.",
    ),
    Cause(
        "E-NO-SCRIPT",
        "The script, module or program to start is not there, or this user may not read or "
        "execute it.",
        "A path is relative to the directory in which elaunch was started, or to --workdir; "
        "--module takes a module's name, --no-python a program that is no Python script.",
    ),
    Cause(
        "E-JOB-FILE",
        "The job file cannot be read, is not YAML, or has a key or a value that means nothing.",
        "The message names the line; docs/job-file.md has the keys, and `elaunch run --dry-run -f "
        "FILE` checks a file without starting anything.",
    ),
    Cause(
        "E-CHECKPOINT-DIR",
        "The directory of --checkpoint-dir cannot be used: it cannot be made or written, is no "
        "directory, does not answer, or belongs to another job.",
        "Give a directory that every node can write to, and each job its own; docs/checkpoints.md.",
    ),
    Cause(
        "E-LOG-DIR",
        "The directory of --log-dir cannot be made or written.",
        "Give another, or leave it out: the logs are then in the run directory.",
    ),
    Cause(
        "E-NO-ENDPOINT",
        "The job has several nodes, and nothing says where they meet.",
        "Give --rdzv-backend c10d --rdzv-endpoint HOST:PORT, the same on all nodes, where HOST is "
        "one of them; docs/rendezvous.md has the other ways.",
    ),
    Cause(
        "E-NODE-RANK",
        "The rank of this node among the nodes is missing, or is none of this job's.",
        "Give each node its own --node-rank, from 0 to the number of nodes less one; with "
        "--rdzv-backend c10d or etcd none is needed.",
    ),
    Cause(
        "E-DEVICES",
        "The devices that --nproc-per-node counts cannot be counted here, or there are none.",
        "See nvidia-smi and CUDA_VISIBLE_DEVICES, or give the number of workers.",
    ),
    Cause(
        "E-NO-RUN",
        "No run of this name is recorded on this machine for this user, or several are.",
        "`elaunch status --all` lists the runs; a run's directory can be given as well.",
        seen="a message of `elaunch status`, `logs`, `stop` and their like",
    ),
    Cause(
        "E-STORE-DENIED",
        "The store in which the nodes' agents meet answers and does not let this agent in, or is "
        "to be hosted by a torch that cannot.",
        "Compare user, password, certificates and the job's secret with those of the other nodes; "
        "docs/rendezvous.md. Where the message names a torch, host the store on another node. If "
        "the job runs already, its training goes on: give the user its old password or role back, "
        "and the agents write again within seconds.",
        seen="exit code 69 of `elaunch run`",
    ),
    Cause(
        "E-STORE-FULL",
        "The store in which the nodes' agents meet takes no more writes: its space is used up.",
        "Compact and defragment etcd, raise its quota, and disarm its alarm; the message has more.",
        seen="exit code 69 of `elaunch run`",
    ),
)
START: Final = tuple(replace(cause, seen=cause.seen or _REFUSED) for cause in _START)

_JOB: Final = (
    Cause(
        "E-USAGE",
        "A flag, a variable or a job file is wrong; no worker was started.",
        "The message names the value and what would be right; `elaunch run --dry-run` checks a "
        "command line without starting anything.",
        command=2,
    ),
    Cause(
        "E-STORE",
        "The store in which the nodes' agents meet cannot be reached, was lost, or does not let "
        "this agent in.",
        "Look at that host and its port from this node; docs/rendezvous.md has the time limits.",
        command=69,
    ),
    Cause(
        "E-NODE-STUCK",
        "A node did not start, or did not end, a round in time, though its agent is there.",
        "The message names it; look there for a server that hangs while it imports (--preload), or "
        "for a process that cannot die since it hangs in the kernel (state D), as in storage that "
        "does not answer.",
        seen="exit code 69 of `elaunch run`, and the words `did not start` or `did not end`",
    ),
    Cause(
        "E-ELAUNCH",
        "elaunch itself failed in a way that has no code of its own.",
        "The message says what was tried; report it with the log.",
        command=70,
    ),
    Cause(
        "E-SERVER",
        "The process that starts the workers could not start, was not ready in time, or was lost "
        "with no restart left.",
        "Its last lines say why: often a module of --preload, or memory.",
        command=71,
    ),
    Cause(
        "E-TOO-FEW-NODES",
        "Too few nodes came together before the join timeout.",
        "The message names those that came; start the others, or lower MIN of --nnodes MIN:MAX.",
        command=72,
    ),
    Cause(
        "E-RUN-DIR",
        "The run directory cannot be created or written.",
        "Set XDG_STATE_HOME to a directory that this user can write to.",
        command=73,
    ),
    Cause(
        "E-CHECKPOINT",
        "The job cannot resume: the checkpoint directory cannot be read, what is there is torn, or "
        "the last save, in memory only, is lost.",
        "`elaunch checkpoints verify` says what is there and what is wrong with it.",
        command=74,
    ),
    Cause(
        "E-PREEMPTED",
        "The job was asked to end, its workers have saved and ended with 0.",
        "Start it again to continue.",
        command=75,
    ),
    Cause(
        "E-ASYMMETRY",
        "The nodes do not run the same thing, and --strict-symmetry is given.",
        "The message names what differs; bring the nodes to one version.",
        command=76,
    ),
    Cause(
        "E-HANG",
        "The workers made no progress for longer than --hang-timeout.",
        "The stacks show where each rank stands: the odd one out is where to look. If all ranks "
        "are in one collective, none is late: look at what carries it. Where a switch drops the "
        "large frames of the hosts, small collectives pass and the first large one hangs: "
        "`ping -M do -s SIZE HOST`, with the MTU of the hosts less 28, then gets no answer. See "
        "docs/hangs.md.",
        command=77,
    ),
    Cause(
        "E-SAME-FAILURE",
        "Rounds in a row failed for the same cause without progress, or lost the same node, so "
        "another restart would not have helped.",
        "`elaunch why --round N` shows the cause of each; --max-same-failures says how many are "
        "enough. Of a node that was lost, look at its own log, its memory and its network.",
        command=78,
    ),
)

SECTIONS: Final = {
    **TEXTS,
    "Signals and exit codes": _ENDS,
    "Before a start": START,
    "The job": _JOB,
}
"""By the headings of docs/errors.md."""
CAUSES: Final = {cause.code: cause for rows in SECTIONS.values() for cause in rows}
OF_COMMAND: Final = {cause.command: cause for cause in _JOB if cause.command}
"""By the exit code of ``elaunch run`` where it is not a worker's."""
_STUCK: Final = re.compile(r" did not (?:start|end) round \d+ in ")
_BY_TEXT: Final = [cause for rows in TEXTS.values() for cause in rows]
_OF_END: Final = {end: cause for cause in CAUSES.values() for end in cause.ends}
_SHM_LOW: Final = 64 << 20
# Other codes are a script's own choice and other signals come from elsewhere: there, a known text
# among the last lines (a connection that was refused once, say) need not be the cause.
TEXT_COUNTS: Final = frozenset({1, 2, -signal.SIGABRT, -signal.SIGBUS})
_PLACEHOLDERS: Final = {
    "of": "",
    "module": "…",
    "hiding": "…",
    "ordinal": "",
    "it": "it",
    "timer": "…",
}


def of_command(exit_code: int, reason: str) -> str:
    """Return the code of what has ended a job, where no worker's failure has; "" of an unknown."""
    if exit_code == StoreError.exit_code and _STUCK.search(reason):
        return "E-NODE-STUCK"
    known = OF_COMMAND.get(exit_code)
    return known.code if known else ""


class Explanation(Struct, frozen=True):
    """A cause and its fix, with the code of the catalogue; empty if none is known."""

    code: str = ""
    cause: str = ""
    fix: str = ""
    victim: bool = False

    @property
    def text(self) -> str:
        """Return the cause and its fix as they are printed."""
        return f"{self.cause} {self.fix}".strip()


def prepare() -> None:
    """Compile what texts are searched for (6 to 10 ms) before a job waits for it; re keeps it."""
    for cause in _BY_TEXT:
        re.compile(cause.text, re.MULTILINE)


def explain(
    end: Exit,
    text: str = "",
    *,
    oom_kill: bool = False,
    local_world_size: int | None = None,
    shm_free: int | None = None,
) -> Explanation:
    """Return the cause of a worker's end as far as it is known, with the fix.

    Args:
        end: how it ended.
        text: its traceback without lines of source; without one its last lines.
        oom_kill: whether the kernel's count of processes killed for memory has grown.
        local_world_size: how many workers the node has.
        shm_free: the free space of /dev/shm in bytes, if known.
    """
    number = -end.exitcode
    if end.timer:
        return _filled(CAUSES["E-TIMER"], timer=end.timer)
    if number == signal.SIGKILL and oom_kill:
        return _filled(CAUSES["E-OOM-KILLED"], it="it")
    if end.exitcode in TEXT_COUNTS:
        found = _by_text(end, text, local_world_size)
        if found is not None:
            return found
    if number > 0:
        return _by_signal(number, text, shm_free)
    return _by_code(end.exitcode, text, oom_kill, shm_free)


def _by_text(end: Exit, text: str, size: int | None) -> Explanation | None:
    """Return what the text is known for.

    The last exception, with those that it was raised from, counts before one that was being handled
    then; but for a victim's. Lines that are no exception's say little of other ranks: the script
    may have tried again.
    """
    found = _match(end, text.rpartition(HANDLING)[2], size)
    if HEADER not in text:
        return None if found and found.victim and end.exitcode > 0 else found
    if found is None or found.victim:
        earlier = _match(end, text, size)
        return found if earlier is None or (found and earlier.victim) else earlier
    return found


def _match(end: Exit, text: str, size: int | None) -> Explanation | None:
    for cause in _BY_TEXT:
        found = re.search(cause.text, text, re.MULTILINE)
        if found:
            words = {name: value for name, value in found.groupdict().items() if value}
            of = f": {words['path']}" if "path" in words else ""
            return _filled(cause, **words, of=of, ordinal=_ordinal(end, size))
    return None


def _filled(cause: Cause, **words: str) -> Explanation:
    known = _PLACEHOLDERS | words
    return Explanation(
        cause.code, cause.cause.format(**known), cause.fix.format(**known), cause.victim
    )


def _ordinal(end: Exit, size: int | None) -> str:
    if size is None or end.rank < size:
        return ""
    return (
        f" RANK is {end.rank} here, but this node's workers are 0 to {size - 1}; "
        f"this one's LOCAL_RANK is {end.local_rank}."
    )


def _by_signal(number: int, printed: str, shm_free: int | None) -> Explanation:
    name = signal_name(number)
    if name not in _OF_END:
        return Explanation()
    found = _filled(_OF_END[name])
    if name == "SIGBUS" and shm_free is not None:
        if shm_free < _SHM_LOW:
            state = f"{found.cause} /dev/shm has {shm_free >> 20} MiB left."
            return replace(found, cause=state, fix=CAUSES["E-SHM-FULL"].fix)
        free = f" /dev/shm has {shm_free >> 20} MiB free now, after its end."
        return replace(found, cause=found.cause + free)
    if name == "SIGABRT" and "ProcessGroupNCCL" in printed:
        watchdog = (
            "The NCCL watchdog ended it after a failed or timed-out collective; the rank that did "
            "not take part is the cause, see its log."
        )
        return Explanation("E-NCCL-TIMEOUT", watchdog, victim=True)
    if "Fatal Python error" in printed and found.fix == _NATIVE:
        return replace(found, fix="")
    return found


def _by_code(code: int, text: str, oom_kill: bool, shm_free: int | None) -> Explanation:
    if code in _OF_END:
        return _filled(_OF_END[code])
    try:
        name = signal.Signals(code - 128).name if code > 128 else ""
    except ValueError:
        return Explanation()
    if not name:
        return Explanation()
    if name == "SIGKILL" and oom_kill:
        found = _filled(CAUSES["E-OOM-KILLED"], it="a process of it")
    else:
        found = _by_signal(code - 128, text, shm_free)
    began = f"{code} is 128 + {code - 128}: a process it had started ended by {name}."
    return replace(found, cause=f"{began} {found.cause}".strip())


def sentence(cause: Cause) -> str:
    """Return what a cause says where nothing is known of the failure itself."""
    return cause.cause.format(**_PLACEHOLDERS)


def told(cause: Cause, quote: str = "") -> Iterator[tuple[str, str]]:
    """Yield what is known of a cause, by titles, of which some are empty; code is ``quoted``."""
    yield "", sentence(cause)
    if cause.fix:
        yield "What to do", cause.fix.format(**_PLACEHOLDERS)
    if cause.start:
        yield "In a message of elaunch itself", cause.start
    if cause.victim:
        yield "", "Another rank that ended or hung first is often behind it."
    ends = (end if isinstance(end, str) else f"exit code {end}" for end in cause.ends)
    seen = [f"the text {' '.join(filter(None, (2 * quote, cause.text, 2 * quote)))}"]
    seen = [*(seen if cause.text else ()), " or ".join(ends), cause.seen]
    seen += [f"exit code {cause.command} of {quote}elaunch run{quote}"] if cause.command else []
    yield "Seen by", "; ".join(filter(None, seen))


def part(cause: Cause) -> str:
    """Return what `elaunch explain` says of a cause."""
    words = [f"{title}: {text}" if title else text for title, text in told(cause)]
    return "\n\n".join([cause.code, *map(folded, words[:-1]), words[-1]]) + "\n"


def folded(text: str) -> str:
    """Return a paragraph in lines."""
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
