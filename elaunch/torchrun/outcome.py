"""What the end of a job is to the program that called: nothing, or torch's exceptions.

torch is imported here only where there is something to raise.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from elaunch import errors
from elaunch.endings import PREEMPTED, how_it_ended
from elaunch.torchrun.agentprocess import Ended


def check(ended: Ended, name: str) -> None:
    """Return if the job has ended well; else raise what its end means.

    Args:
        ended: the job's end.
        name: what the failures are headed by.

    Raises:
        SignalException: a signal ended the job: one of this process, or one to its agent.
        SystemExit: with 75, where the job was asked to end and is to be continued; with 2 for a
            command line that cannot be read.
        ChildFailedError: workers failed, and no restart was left.
        ElaunchError: what elaunch itself cannot do, of the class that the agent raised.
    """
    record, code = ended.record, ended.exit_code
    state = "" if record is None else record["state"]
    if ended.received or state == "STOPPED":
        signum = ended.received[0] if ended.received else signal.Signals(max(1, code - 128))
        _raise_signal(signum)
    if code == 0:
        return
    if code < 0:
        raise errors.ElaunchError(f"the agent {how_it_ended(code)}; the job has ended with it")
    if state == "PREEMPTED":
        sys.exit(PREEMPTED)
    if record is not None and record["reason"] != ended.error:
        elsewhere, failure = record.get("job_failure"), record["failure"]
        if elsewhere is not None:
            _raise_failures(name, [_elsewhere(elsewhere)])
        if failure is not None:
            parts = (failure["first"], *failure["victims"], *failure["stopped"])
            _raise_failures(name, [part for part in parts if part["exitcode"]] or [parts[0]])
        raise errors.ElaunchError(f"{record['reason']} (exit code {code})")
    kind, _, text = ended.error.partition(": ")
    found = vars(errors).get(kind)
    if isinstance(found, type) and issubclass(found, errors.ElaunchError):
        raise found(text)
    if code == errors.UsageError.exit_code:
        sys.exit(code)
    raise errors.ElaunchError(ended.error or f"the agent ended with {code}: see its messages")


def _raise_signal(signum: signal.Signals) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException

    raise SignalException(f"Process {os.getpid()} got signal: {signum}", sigval=signum)


def _raise_failures(name: str, workers: list[dict[str, Any]]) -> None:
    """Raise a ChildFailedError, whose first failure is the first of ``workers``."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    raise ChildFailedError(name, {worker["rank"]: _failure(worker) for worker in workers})


def _failure(worker: Mapping[str, Any]) -> Any:
    """Return a worker of a failure report as a ProcessFailure.

    torch's own constructor raises for an error file that is torn; such a one is no use here either,
    and the report says why.
    """
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path, problem = worker["error_file"], worker["error_file_problem"]
    failure = ProcessFailure(worker["local_rank"], worker["pid"], worker["exitcode"], "")
    failure.timestamp = int(worker["at"])
    if path and not problem:
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            failure.error_file_data = json.load(file)
            failure.error_file, failure.message = path, failure.error_file_data["message"]
    elif problem or (worker["exitcode"] > 0 and worker["traceback"]):
        failure.message = problem or worker["traceback"]
    return failure


def _elsewhere(failure: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first failure of the job, on another node, as a worker of a failure report."""
    import time

    text = {"traceback": failure["text"], "error_file": None, "error_file_problem": None}
    return {**failure, **text, "at": time.time() - failure["age"]}
