"""The events that can happen to an agent: frozen, posted by threads into the one queue.

==================  =======================  ======================================================
event               posted by                meaning
==================  =======================  ======================================================
ServerReady         server reader            the server has imported what it should, or could not
ServerWarmed        server reader            the server has imported what was to be imported later
WorkerStarted       server reader            a worker was forked
WorkerNotStarted    server reader            a worker could not be forked
Exit                server reader            a worker's wait returned
TreeGone            server reader            nothing of the round is left, but for the survivors
StoreLost           server reader            the round's TCPStore could not be hosted any longer
DevicesCounted      server reader            how many workers this node has, or why that is unknown
DirectoryProbed     probe                    the checkpoint directory can be used, or cannot; there
                                             may be none
ServerLost          reaper                   the server itself ended
CheckpointChosen    checkpoint search        what was found, and passed over; where one node is the
                                             whole job, its coordinator decides by it
SignalReceived      signal handlers,         a person, a scheduler or the kernel signalled the
                    notice command           agent, or its machine will be taken
DeadlinePassed      the loop's own clock     the state's deadline has come
Fenced              server reader            all workers were killed: no renewal came in time
WorkerListens       workers' links           a script asks should_preempt()
WorkerStands        workers' links           a script is in a loop that can go on without a rank, or
                                             it has left it
WorkerEnters        workers' links           a worker that was kept knows of the new round, or is
                                             in it
NoticeKnown         workers' links           it knows of a notice from another node's agent
PreemptAcked        workers' links           a script reports that it ends because of the notice
PreemptAsked        control socket, timer,   somebody asks that the job end, to be continued
                    notice command
RanksAsked          sampler                  which rank comes last is known anew, and goes to
                                             other nodes' agents
RestartAsked        control socket           somebody asks that the round end and the next one begin
HangSeen            sampler                  the workers make no progress for too long
StacksTaken         stacks                   what the workers were doing then
SaverUsed           saver                   a worker has the agent write its checkpoints
SavesSettled        saver                   what the round has left in memory is on disk, lost, or
                                             for the next round to load
FenceAsked          saver                   answer, whether a round may still commit
Ping                health check             answer, to show that the loop is alive
PlanSeen, CutOff,   the rendezvous           what the coordinator has decided, and what the other
Rejoined, …                                  nodes' agents have to do with
                                             (elaunch.rendezvous.events)
==================  =======================  ======================================================
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import Struct

from elaunch.agent.hangs.hang import HangVerdict
from elaunch.agent.hangs.stackdump import StackGroup
from elaunch.checkpoint.records import SearchOutcome
from elaunch.endings import Exit as Exit
from elaunch.errors import CheckpointError
from elaunch.rendezvous.decide.view import SearchResult
from elaunch.rendezvous.events import CutOff as CutOff
from elaunch.rendezvous.events import MeetingFailed as MeetingFailed
from elaunch.rendezvous.events import PlanSeen as PlanSeen
from elaunch.rendezvous.events import Rejoined as Rejoined
from elaunch.rendezvous.events import StillWaiting as StillWaiting
from elaunch.rendezvous.events import StoreBack as StoreBack
from elaunch.rendezvous.events import StoreSilent as StoreSilent
from elaunch.rendezvous.plan import HeldShards, PlanCheckpoint
from elaunch.wire.worker import Notice


class ServerReady(Struct, frozen=True):
    """The server is ready to start workers; ``problem`` says why it never will be.

    ``unforkable`` says which module of --preload has started threads: forks of it would hang.
    """

    problem: str | None
    unforkable: str = ""


class ServerWarmed(Struct, frozen=True):
    """The server has imported the later modules, in ``seconds``, or could not: ``problem``.

    ``settings`` are variables that the script sets and those modules read: they are left to it.
    ``compiles``: those modules are what ``torch.compile`` takes.
    """

    problem: str | None
    seconds: float
    settings: tuple[str, ...] = ()
    compiles: bool = False


class WorkerStarted(Struct, frozen=True):
    """Worker ``local_rank`` of ``round`` runs as ``pid`` since ``at`` (monotonic seconds)."""

    round: int
    local_rank: int
    pid: int
    at: float


class WorkerNotStarted(Struct, frozen=True):
    """Worker ``local_rank`` of ``round`` could not be started: ``problem``."""

    round: int
    local_rank: int
    problem: str


class RanksAsked(Struct, frozen=True):
    """The workers were asked which of them comes last to the collectives, of several nodes."""


class TreeGone(Struct, frozen=True):
    """All of ``round`` has ended; ``killed`` had outlived the workers, ``survivors`` cannot die.

    A survivor has the user whose process it is if that is why, None if it hangs in the kernel. The
    workers with the local ranks ``kept`` were to stay.
    """

    round: int
    killed: tuple[tuple[int, str], ...] = ()
    survivors: tuple[tuple[int, str, int | None], ...] = ()
    kept: frozenset[int] = frozenset()


class StoreLost(Struct, frozen=True):
    """The workers' TCPStore is not hosted any longer."""

    problem: str


class DirectoryProbed(Struct, frozen=True):
    """The checkpoint directory, if any, was looked at; ``problem``: it cannot be used."""

    problem: str = ""
    remark: str = ""


class DevicesCounted(Struct, frozen=True):
    """How many workers a name like ``gpu`` means on this machine; ``problem``: none, and why."""

    count: int | None
    problem: str | None


class ServerLost(Struct, frozen=True):
    """The server ended although nobody asked it to; ``exitcode`` as in Exit."""

    exitcode: int


class CheckpointChosen(Struct, frozen=True):
    """The search for the newest complete checkpoint came back.

    ``problem`` says why it could not, and ``exit_code`` is what the agent then ends with.
    """

    search: SearchOutcome
    problem: str | None = None
    exit_code: int = CheckpointError.exit_code

    @property
    def result(self) -> SearchResult:
        """The result of the search, as the coordinator takes it."""
        if self.problem is not None:
            return SearchResult(problem=self.problem, exit_code=self.exit_code)
        found = self.search.checkpoint
        if found is None:
            return SearchResult()
        return SearchResult(PlanCheckpoint(str(found.path), found.step, found.format))


class SignalReceived(Struct, frozen=True):
    """The agent got ``signum``; or the same is to be done for ``notice``, which --notice-command
    has printed: its ``grace`` is the seconds until this machine is taken.

    ``sender`` is " (sent by NAME, pid N)", where that is known.
    """

    signum: signal.Signals
    notice: Notice | None = None
    sender: str = ""

    @property
    def reason(self) -> str:
        """The beginning of reasons: the signal, or the notice in its place."""
        return f"{self.signum.name} received" if self.notice is None else self.notice.reason


class DeadlinePassed(Struct, frozen=True):
    """The loop's deadline has come: a grace is over, or the coordinator's backoff."""


class Fenced(Struct, frozen=True):
    """The server has killed all workers, ``late`` seconds after the moment that it was given."""

    late: float


class WorkerListens(Struct, frozen=True):
    """The script of worker ``local_rank`` asks should_preempt(): a notice can have it end."""

    round: int
    local_rank: int


class WorkerStands(Struct, frozen=True):
    """The script of worker ``local_rank`` can go on with a new group when a rank is lost."""

    round: int
    local_rank: int
    stands: bool


class WorkerEnters(Struct, frozen=True):
    """Worker ``local_rank``, which was kept, knows of ``round``; ``done``: it takes part in it."""

    round: int
    local_rank: int
    done: bool


class NoticeKnown(Struct, frozen=True):
    """The workers of ``round`` know of a notice."""

    round: int
    notice: Notice


class PreemptAcked(Struct, frozen=True):
    """Worker ``local_rank`` ends because of the notice: its exit code 0 is not the job's end."""

    round: int
    local_rank: int
    notice: Notice


@dataclass(frozen=True)
class PreemptAsked:
    """Somebody asks that the job end and be continued later; ``answer`` takes what is done.

    ``left``: seconds until the platform ends it; None: nobody knows.
    """

    reason: str
    answer: Callable[[str], None] = field(compare=False)
    left: float | None = None


@dataclass(frozen=True)
class RestartAsked:
    """Somebody asks for another round; ``answer`` takes what is done, and whether it is.

    ``at`` is when, in monotonic seconds.
    """

    reason: str
    answer: Callable[[tuple[str, bool]], None] = field(compare=False)
    at: float = 0.0


class HangSeen(HangVerdict, frozen=True, kw_only=True):
    """Workers of ``round`` hang.

    ``at`` is when that was found, in monotonic seconds; ``last`` are lines about what each rank
    reported last; ``pid`` is that of the first of the ranks that hang.
    """

    round: int
    at: float = 0.0
    last: tuple[str, ...] = ()
    pid: int = 0


class StacksTaken(Struct, frozen=True):
    """The stacks of the workers of ``round``; ``problems`` say whose there are not, and why.

    ``last`` are lines about what each rank reported last.
    """

    round: int
    groups: tuple[StackGroup, ...] = ()
    problems: tuple[tuple[tuple[int, ...], str], ...] = ()
    last: tuple[str, ...] = ()


class SaverUsed(Struct, frozen=True):
    """A worker of ``round`` leaves its checkpoints in the agent's memory (elaunch.wire.worker)."""

    round: int


class SavesSettled(Struct, frozen=True):
    """Nothing of ``round`` is waited for: names of what was ``committed``, and what is lost.

    ``held`` is in memory, and may be what the next round resumes from.
    """

    round: int
    committed: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    held: tuple[HeldShards, ...] = ()


@dataclass(frozen=True)
class FenceAsked:
    """May ``round`` still commit the checkpoint ``uuid``? ``answer`` takes why not, or ""."""

    round: int
    answer: Callable[[str], None] = field(compare=False)
    uuid: str = ""


@dataclass(frozen=True)
class Ping:
    """Somebody asks whether the loop is alive; calling ``answer`` says yes."""

    answer: Callable[[], None] = field(compare=False)


Event = (
    ServerReady
    | ServerWarmed
    | WorkerStarted
    | WorkerNotStarted
    | Exit
    | RanksAsked
    | TreeGone
    | StoreLost
    | DevicesCounted
    | DirectoryProbed
    | ServerLost
    | CheckpointChosen
    | SignalReceived
    | DeadlinePassed
    | Fenced
    | WorkerListens
    | WorkerStands
    | WorkerEnters
    | NoticeKnown
    | PreemptAcked
    | PreemptAsked
    | RestartAsked
    | HangSeen
    | StacksTaken
    | SaverUsed
    | SavesSettled
    | FenceAsked
    | Ping
    | PlanSeen
    | CutOff
    | Rejoined
    | StillWaiting
    | StoreSilent
    | StoreBack
    | MeetingFailed
)
