"""Views of all nodes of a running job, by its agents, and requests to them.

Stacks, workers and log files of other nodes: the agent of this node is asked, which asks the others
(``elaunch.agent.status.views``). From a machine without one the agents are asked at the addresses
that the store has where they meet, as they ask each other (elaunch.views.store). And that the
job stop, be preempted, or begin another round: docs/status.md and docs/preemption.md.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from elaunch import text
from elaunch.agent.hangs.stackdump import StackGroup, joined
from elaunch.errors import UsageError
from elaunch.runs.directory import RunDir, run_id_of
from elaunch.runs.identity import SUSPENDED, condition
from elaunch.runs.record import Record
from elaunch.wire import control
from elaunch.wire.control import LOGS_S, MOST_BYTES, PROFILE_S, STACKS_S

ANSWER_S: Final = 15.0
"""Seconds for the agent to answer; it serves one client after the other, each in a few seconds."""


class Asked(Protocol):
    """A job whose agents are asked without one on this machine (elaunch.views.store)."""

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[int, dict[str, Any]]:
        """Return what each node answers, by node rank."""

    def node_of(self, rank: int) -> int:
        """Return the node of a rank; UsageError where there is none."""


class _Taken(msgspec.Struct):
    host: str
    groups: tuple[StackGroup, ...]
    problems: tuple[tuple[tuple[int, ...], str], ...]


@dataclass(frozen=True)
class JobStacks:
    """Where all workers of a job are; ``silent`` are nodes of which nothing is known, with why."""

    groups: tuple[StackGroup, ...]
    problems: tuple[tuple[tuple[int, ...], str], ...]
    silent: tuple[tuple[int, str], ...]

    def to_dict(self) -> dict[str, object]:
        """Return it for ``elaunch stacks --json``."""
        return {
            "schema": 1,
            "groups": [{**group.to_dict(), "values": dict(group.values)} for group in self.groups],
            "problems": [{"ranks": ranks, "text": why} for ranks, why in self.problems],
            "silent": [{"node": node, "text": why} for node, why in self.silent],
        }

    def lines(self) -> Iterator[str]:
        """Yield what people read, the smallest groups first."""
        for group in self.groups:
            yield f"{text.ranks(group.ranks)}:"
            values = dict(group.values)
            for frame in group.main:
                yield f"  {frame}"
                yield from (f"      {value}" for value in values.get(frame, ()))
            for ranks, stack in group.threads:
                yield f"  another thread of {text.ranks(ranks)}:"
                yield from (f"    {frame}" for frame in stack)
        for ranks, why in self.problems:
            yield f"no stacks of {text.ranks(ranks)}: {why}"
        for node, why in self.silent:
            yield f"no stacks of node {node}: {why}"
        if not (self.groups or self.problems or self.silent):
            yield "no worker runs now"


def stacks_of(run: RunDir | Asked, options: Sequence[str]) -> JobStacks:
    """Return the stacks of all workers of a run; raises UsageError where no agent answers."""
    groups: list[StackGroup] = []
    problems: list[tuple[tuple[int, ...], str]] = []
    silent: list[tuple[int, str]] = []
    shown = ask(run, {"of": "stacks", "options": list(options)}, STACKS_S)
    for node, answer in sorted(shown.items()):
        if "error" in answer:
            silent.append((node, str(answer["error"])))
            continue
        taken = msgspec.convert(answer, _Taken)
        groups += taken.groups
        problems += taken.problems
    return JobStacks(joined(groups), tuple(problems), tuple(silent))


def profile_of(
    run: RunDir | Asked, rank: int, seconds: int, path: Path, native: bool
) -> tuple[int, str]:
    """Write the flame graph of a rank of any node; return its pid, and why there is none, or ""."""
    request: dict[str, Any] = {"of": "profile", "rank": rank, "seconds": seconds, "native": native}
    if not isinstance(run, RunDir):
        request["nodes"] = [run.node_of(rank)]
    ((_, answer),) = ask(run, request, seconds + PROFILE_S).items()
    if "error" in answer:
        return 0, str(answer["error"])
    path.write_text(str(answer["svg"]))
    return int(answer["pid"]), ""


def answer_of(
    run: RunDir,
    request: Mapping[str, object],
    seconds: float,
    means: str = "",
    *,
    stack: contextlib.ExitStack | None = None,
) -> dict[str, Any]:
    """Return what the run's agent answers to ``request``.

    Raises UsageError where none does; ``means`` says what became of the request where the
    agent has not answered for ``seconds``, as in ", so it is withdrawn"; ``stack`` as in
    ``control.ask``.
    """
    name = run_id_of(run)
    if why := suspended(run):
        raise UsageError(f"RUN {name} cannot answer now: its {why}")
    try:
        return control.ask(run.socket, request, seconds, stack)
    except (FileNotFoundError, ConnectionRefusedError):
        raise UsageError(
            f"RUN {name} does not run: `elaunch status {name}` tells how it ended"
        ) from None
    except PermissionError:
        raise UsageError(f"RUN {name} belongs to another user") from None
    except TimeoutError:
        raise UsageError(
            f"RUN {name} has not answered for {seconds:g} s{means}: its agent is stopped or "
            f"overloaded; look at `elaunch status {name}`, then ask again"
        ) from None
    except ConnectionError as error:
        raise UsageError(f"RUN {name} could not be asked: {error}") from None


def suspended(run: RunDir) -> str:
    """Return why the run's agent on this machine does nothing at present, or ""."""
    agent = run.read_state()["agent"]
    return SUSPENDED.format(pid=agent["pid"]) if condition(agent) == "stopped" else ""


def send_stop(run: RunDir) -> int | None:
    """Send SIGTERM to the agent; return a descriptor of its process, None if it has just ended.

    Raises UsageError where no agent of this user runs on this machine.
    """
    name = run_id_of(run)
    agent = _agent(run, name)
    try:
        signal.pidfd_send_signal(agent, signal.SIGTERM)
    except ProcessLookupError:
        os.close(agent)
        return None
    except PermissionError:
        os.close(agent)
        raise UsageError(f"RUN {name} belongs to another user") from None
    return agent


def _agent(run: RunDir, name: str) -> int:
    """Return a descriptor of the agent's process; raise UsageError if there is none here."""
    agent = _own(run, name, "stop")["agent"]
    try:
        pidfd = os.pidfd_open(agent["pid"])
    except ProcessLookupError:
        pidfd = -1
    # The descriptor is of the recorded process if that is there now.
    if pidfd >= 0 and condition(agent) in ("alive", "stopped"):
        return pidfd
    if pidfd >= 0:
        os.close(pidfd)
    raise UsageError(f"RUN {name} does not run: `elaunch status {name}` tells how it ended")


def _own(run: RunDir, name: str, verb: str) -> Record:
    """Return the record of a run of `elaunch run` on this machine; raise UsageError for others."""
    record = run.read_state()
    if "launcher" in record:
        raise UsageError(
            f"RUN {name} was started by {record['launcher']}, not by `elaunch run`: {verb} that"
        )
    if condition(record["agent"]) == "elsewhere":
        raise UsageError(f"RUN {name} runs on {record['agent']['host']}: {verb} it there")
    return record


def asked(run: RunDir, request: Mapping[str, object], verb: str) -> str:
    """Send the agent a request with a reason; return what is done about it.

    Raises UsageError where it does not run here, or does nothing about it.
    """
    name = run_id_of(run)
    _own(run, name, verb)
    answer = answer_of(run, request, ANSWER_S, ", so the request is withdrawn")
    if "refused" in answer:
        raise UsageError(f"RUN {name}: {answer['refused']}")
    return str(answer["done"])


def ask(
    run: RunDir | Asked, request: Mapping[str, object], seconds: float
) -> dict[int, dict[str, Any]]:
    """Return what each node answers, by node rank; raises UsageError where no agent answers.

    Of a run on this machine its agent is asked, which asks the others.
    """
    if not isinstance(run, RunDir):
        return run.ask(request, seconds)
    agent = run.read_state()["agent"]
    if condition(agent) == "elsewhere":
        raise UsageError(f"RUN {run_id_of(run)} runs on {agent['host']}: ask there")
    answer = answer_of(run, {"op": "view", **request}, seconds)
    return {int(node): shown for node, shown in answer["nodes"].items()}


class RemoteTree:
    """The log files of another node, as its agent reads them (``logtree.LogTree`` is the same)."""

    def __init__(self, run: RunDir | Asked, node: int) -> None:
        self._run = run
        self._node = node

    def files(self) -> dict[str, tuple[int, float]]:
        """Return size and time of the last change of each log file; raises OSError."""
        found = self._ask({"of": "files"})["files"]
        return msgspec.convert(found, dict[str, tuple[int, float]])

    def read(self, name: str, at: int, most: int) -> bytes:
        """Return up to ``most`` bytes of a file from ``at`` on; raises OSError."""
        most = min(most, MOST_BYTES)
        asked = {"of": "bytes", "name": name, "at": at, "most": most}
        return str(self._ask(asked)["bytes"]).encode("latin-1")

    def _ask(self, request: dict[str, object]) -> dict[str, Any]:
        nodes = ask(self._run, {**request, "nodes": [self._node]}, 2 * LOGS_S)
        answer = nodes.get(self._node, {"error": "it is not in the round that runs"})
        if "error" in answer:
            raise ConnectionError(answer["error"])
        return answer
