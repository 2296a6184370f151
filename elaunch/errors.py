"""Every exception that elaunch raises on purpose.

::

    ElaunchError                what happened, to whom, and what to do; carries an exit code
    ├── UsageError              a flag, a variable or a job file is wrong; nothing was started
    ├── StoreError              something is wrong between this agent and the job's store
    │   ├── StoreUnreachable    nobody answers there, or what answers is no store of this job
    │   │   ├── StoreReplaced   what answers is not the store that this agent has an entry in
    │   │   └── StoreFull       it answers and takes no more writes
    │   ├── StoreDenied         it answers and does not let us in
    │   ├── LeaseLost           it has given us up: our entry expired or was removed
    │   └── StoreClosed         our own side of it was closed meanwhile
    ├── ServerError             the process that starts the workers could not start or was lost
    ├── RunDirError             the run directory cannot be created or written
    ├── CheckpointError         a checkpoint is torn, foreign or unreadable
    │   ├── DamageError         its files are not those of its manifests; it is not to be read
    │   ├── RankFileMissing     a rank's own file of it is missing; all that is there is whole
    │   └── SaveError           a checkpoint was not committed; what was there before is untouched
    ├── JoinTimeoutError        too few nodes came together before the join timeout
    ├── SymmetryError           the nodes do not run the same thing, and --strict-symmetry is given
    ├── HangError               the workers made no progress for longer than --hang-timeout
    ├── SameFailureError        rounds in a row failed for one cause (--max-same-failures)
    └── ScriptError             the script API (``import elaunch``) cannot do what a script asks
        ├── ContextError        it is used in a way that it cannot be: twice, after its end
        ├── PlacementError      ranks and sizes that contradict each other, or are nowhere given
        ├── MetricError         a metric, a progress or a status that cannot be written
        ├── SamplerError        the data order cannot be followed from here; nothing was read
        ├── NotFiniteError      a micro-batch has a loss or a gradient that is not finite
        ├── BitsDifferError     two ranks computed one micro-batch, and their bits differ
        └── CollectiveError     a call of all ranks was not completed; ``missing`` are ranks
            ├── CollectiveTimeout   not all ranks came before the deadline
            └── PeerLost            a rank has ended, or cannot be reached any more

``elaunch run`` turns any of them into one message on stderr, which ends with the error's code for
``elaunch explain`` (docs/errors.md), and the exit code of the class (docs/exit-codes.md). Anything
else that escapes is a defect of elaunch and shows its traceback.
"""


class ElaunchError(Exception):
    """Base of all deliberate errors.

    ``exit_code`` is what the command ends with, ``code`` the stable name of the cause in
    docs/errors.md: the class's, or a more exact one that is given where the error is made.
    """

    exit_code = 70
    code = "E-ELAUNCH"

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        if code:
            self.code = code


class UsageError(ElaunchError):
    """A flag, a variable or a job file is wrong: names the value, the reason and the fix."""

    exit_code = 2
    code = "E-USAGE"


class StoreError(ElaunchError):
    """Something is wrong between this agent and the store in which the job's agents meet."""

    exit_code = 69
    code = "E-STORE"


class StoreUnreachable(StoreError):
    """Nobody answers at the store's address, or what answers is no store of this job.

    ``nobody_decides``: this is proof that no coordinator can act meanwhile either: the port of the
    process that hosts the store is closed, or etcd itself reports that it has no leader.
    """

    def __init__(self, message: str, nobody_decides: bool = False) -> None:
        super().__init__(message)
        self.nobody_decides = nobody_decides


class StoreReplaced(StoreUnreachable):
    """The store that answers is not the one that this agent is a member of: that one ended.

    It knows nothing of this job's agents; an entry of theirs is gone for good.
    """


class StoreFull(StoreUnreachable):
    """The store answers and takes no more writes: its space is used up. Names what to do."""

    code = "E-STORE-FULL"


class StoreDenied(StoreError):
    """The store answers and does not let us in: TLS, certificate, user, password, old torch."""

    code = "E-STORE-DENIED"


class LeaseLost(StoreError):
    """The store has given this agent up: its entry expired or was removed."""


class StoreClosed(StoreError):
    """Our own side of the store was closed while a call waited."""


class ServerError(ElaunchError):
    """The server process that starts the workers could not start, or was lost."""

    exit_code = 71
    code = "E-SERVER"


class RunDirError(ElaunchError):
    """The run directory cannot be created or written."""

    exit_code = 73
    code = "E-RUN-DIR"


class CheckpointError(ElaunchError):
    """A checkpoint is torn, foreign or unreadable."""

    exit_code = 74
    code = "E-CHECKPOINT"


class DamageError(CheckpointError):
    """A checkpoint's files are not those of its manifests; raised on all ranks that read it."""


class RankFileMissing(CheckpointError):
    """A rank's own file is missing; all that is there of the checkpoint is whole."""


class SaveError(CheckpointError):
    """A checkpoint was not committed; what was there before is untouched.

    ``no_room``: a disk, or a quota, was full on some rank. ``lost``: it was in flight, and an agent
    has given it up. ``stays``: the stage belongs to another process, or to the one that chooses
    the next checkpoint, and is not to be removed.
    """

    no_room = False
    lost = False
    stays = False


class JoinTimeoutError(ElaunchError):
    """Too few nodes came together before the join timeout; names who is there."""

    exit_code = 72
    code = "E-TOO-FEW-NODES"


class SymmetryError(ElaunchError):
    """The nodes do not run the same thing, and ``--strict-symmetry`` is given."""

    exit_code = 76
    code = "E-ASYMMETRY"


class HangError(ElaunchError):
    """The workers made no progress for longer than ``--hang-timeout``, and no restart was left."""

    exit_code = 77
    code = "E-HANG"


class SameFailureError(ElaunchError):
    """Rounds in a row failed for one cause without progress, or lost the same node."""

    exit_code = 78
    code = "E-SAME-FAILURE"


class ScriptError(ElaunchError):
    """The script API cannot do what a script asks."""


class ContextError(ScriptError, RuntimeError):
    """The script API is used in a way that it cannot be."""


class PlacementError(ScriptError, ValueError):
    """Ranks and sizes contradict each other, or are nowhere given; names the value."""


class MetricError(ScriptError, ValueError):
    """A metric, a progress or a status cannot be written; names it and the reason."""


class SamplerError(ScriptError, ValueError):
    """The order of the data cannot be followed: other data, another seed, a miscounted step."""


class NotFiniteError(ScriptError, ArithmeticError):
    """A micro-batch has a loss or gradients that are not finite; no weight has changed."""


class BitsDifferError(ScriptError, ArithmeticError):
    """Ranks have computed different bits of one micro-batch; names them. No weight has changed."""


class CollectiveError(ScriptError, RuntimeError):
    """A call that all ranks make together was not completed.

    ``missing`` are the ranks that did not take part, as far as that is known; the text names their
    hosts and what they called last. The ranks are connected no more after it.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class CollectiveTimeout(CollectiveError, TimeoutError):
    """Not all ranks made the call before the deadline."""


class PeerLost(CollectiveError, ConnectionError):
    """A rank has ended, or cannot be reached any more."""
