"""Views of a job's nodes, asked for through the agent of one: workers, stacks, log files.

The command sends the agent of its node one message (elaunch.wire.control) with ``of``, and which
``nodes`` it means by node rank, or none for all; the agent asks the others' agents (elaunch.agent
.peers), all at once. An answer has ``nodes``: by node rank what is below, or ``error``.

==========  ===============================  =====================================================
``of``      with                             the answer of a node
==========  ===============================  =====================================================
stacks      ``options`` for py-spy           ``host``, ``groups`` and ``problems``, as StacksTaken
workers                                      ``round`` and ``awaited`` as in the record,
                                             ``workers`` as elaunch.runs.job.WorkerSeen
profile     ``rank``, ``seconds``,           ``svg`` and ``pid``; the node of that rank is asked
            ``native``
report      ``round``, or null for the       ``round``, ``host``, ``text`` and ``report``: the
            newest                           failure report, its JSON or null; ``round`` is null
                                             where no round has failed
files                                        ``files``: by name size and time of the last change
bytes       ``name``, ``at``, ``most``       ``bytes`` of that file, as latin-1
debug       ``rank`` of this node, ``run``   no ``nodes``: ``pid``, or ``refused`` and why; no rank
                                             counts as hanging until the command hangs up
==========  ===============================  =====================================================

Nothing here changes the job. Each request has a thread; more than MOST at a time are refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from elaunch import env, proc
from elaunch.agent.hangs import stacks
from elaunch.agent.hangs.living import RoundWorkers
from elaunch.agent.peers.messages import PeerConnection, ask_nodes
from elaunch.agent.policy.events import StacksTaken
from elaunch.checkpoint.storage.files import parse_json, read_limited
from elaunch.errors import CheckpointError
from elaunch.runs import usage
from elaunch.runs.directory import RunDir
from elaunch.runs.job import WorkerSeen, progress_of
from elaunch.runs.logtree import LogTree
from elaunch.wire.control import (
    LOGS_S,
    LONGEST_S,
    MOST_BYTES,
    PROFILE_S,
    SPY_OPTIONS,
    STACKS_S,
    WORKERS_S,
)
from elaunch.wire.local import LocalChannel, Message, close_files

if TYPE_CHECKING:
    from elaunch.agent.peers.peers import Peers
    from elaunch.runs.record import Record

MOST: Final = 8
SEND_S: Final = 5.0
MOST_REPORT: Final = 4 << 20
"""Bytes of a failure report that one agent sends; most have some ten KB."""
MOST_SVG: Final = 16 << 20
"""Bytes of a flame graph that one agent sends another; most have some hundred KB."""
_PATIENCE: Final = {
    "stacks": STACKS_S - LOGS_S,
    "report": LOGS_S,
    "files": LOGS_S,
    "bytes": LOGS_S,
    "profile": PROFILE_S - LOGS_S,
    "workers": 0.75 * WORKERS_S,
}

log = logging.getLogger("elaunch")


class NodeViews:
    """Answers commands and other agents.

    ``stacks`` returns the workers' stacks as py-spy's options have them shown; ``log_root`` is None
    where no log files are kept; ``record`` returns the run's record of now. ``watched``: hangs are
    looked for.
    """

    def __init__(
        self,
        workers: RoundWorkers,
        stacks: Callable[[tuple[str, ...]], StacksTaken],
        log_root: Path | None,
        record: Callable[[], Mapping[str, Any]],
        *,
        watched: bool,
    ) -> None:
        self._workers = workers
        self._stacks = stacks
        self._watched = watched
        self._record = record
        self._tree = None if log_root is None else LogTree(log_root)
        self._measured: Mapping[int, usage.Measurement] = {}
        self._peers: Peers | None = None
        self._room = threading.BoundedSemaphore(MOST)

    def meet(self, peers: Peers) -> None:
        """Ask the other nodes' agents, and answer them, from now on."""
        self._peers = peers
        peers.handle("view", self._on_asked)

    def serve(self, channel: LocalChannel, request: Message, files: list[int]) -> None:
        """Answer a command in a thread of its own, and hang up."""
        close_files(files)
        if not self._room.acquire(blocking=False):
            with contextlib.suppress(OSError), contextlib.closing(channel):
                channel.send({"error": f"{MOST} such requests are being answered"}, (), 0.0)
            return
        run = partial(self._serve, channel, request)
        try:
            threading.Thread(target=run, name="view", daemon=True).start()
        except RuntimeError as error:
            self._room.release()
            with contextlib.suppress(OSError), contextlib.closing(channel):
                channel.send({"error": f"the agent cannot answer for now: {error}"}, (), 0.0)

    def _serve(self, channel: LocalChannel, request: Message) -> None:
        try:
            if request.get("of") == "debug":
                self._hold(channel, request.get("rank"), request.get("run"))
            else:
                channel.send(self._answer(request), (), SEND_S)
        except OSError as error:
            log.debug("a command that asked for a view is gone: %s", error)
        except Exception:
            log.exception("a view could not be shown")
        finally:
            channel.close()
            self._room.release()

    def _hold(self, channel: LocalChannel, rank: object, run: object) -> None:
        """Let no rank count as hanging while a debugger of ``rank`` is there."""
        with contextlib.ExitStack() as stack:
            pid = self._workers.pid(rank) if type(rank) is int else 0
            refused = self._no_debugger(rank, pid, run)
            if not refused and not stack.enter_context(self._workers.held_by_debugger(pid)):
                refused = f"another `elaunch debug` looks at rank {rank}"
            channel.send({"refused": refused} if refused else {"pid": pid}, (), SEND_S)
            if not refused:
                channel.receive()

    def _no_debugger(self, rank: object, pid: int, run: object) -> str:
        """Return why no debugger can look at ``rank`` of ``run``, or ""."""
        begun = self._workers.now.begun
        if begun is None:
            return "no worker runs now"
        if type(rank) is not int or not 0 <= rank < begun.place.world_size:
            return f"--rank {rank} is none of 0 to {begun.place.world_size - 1}"
        node = begun.node_of(rank)
        if begun.plan is not None and node != begun.place.node_rank:
            return (
                f"rank {rank} runs on node {node}, {begun.plan.nodes[node].host}: type "
                f"`elaunch debug {run} --rank {rank}` there"
            )
        if not pid:
            return f"rank {rank} does not run now: `elaunch status {run}` tells what became of it"
        if begun.place.nodes > 1 and self._watched:
            return (
                "with --hang-timeout on several nodes the other nodes would take the wait for a "
                "hang; start the job without it to debug it"
            )
        if not proc.catches(pid, env.DEBUG_SIGNAL):
            return (
                f"rank {rank} is no fork of the server, or is still being started, and cannot be "
                "debugged so; `elaunch stacks --native --locals` shows where it is"
            )
        return ""

    def _answer(self, request: Mapping[str, Any]) -> dict[str, object]:
        of = request.get("of")
        if of not in _PATIENCE:
            return {"error": f"'of' is {of!r}, known: {', '.join(map(repr, _PATIENCE))}"}
        numbers = ("rank", "seconds") if of == "profile" else ()
        if not all(type(request.get(name)) is int for name in numbers):
            return {"error": "'rank' and 'seconds' must be numbers"}
        begun = self._workers.now.begun
        own = 0 if begun is None else begun.place.node_rank
        count = len(begun.plan.nodes) if begun is not None and begun.plan is not None else 1
        wanted = request.get("nodes")
        if of == "profile" and begun is not None:
            wanted = [begun.node_of(request["rank"])]
        nodes = [node for node in range(count) if wanted is None or node in wanted]
        until = time.monotonic() + _patience(request)

        def ask(node: int) -> dict[str, Any]:
            return self._own(request) if node == own else self._ask(node, request, until)

        found = ask_nodes(nodes, ask, _patience(request))
        return {"nodes": {str(node): answer for node, answer in found.items()}}

    def _ask(self, node: int, request: Mapping[str, Any], until: float) -> dict[str, Any]:
        """Return what a node answers; one that is frozen leaves time for those that come after."""
        if self._peers is None:
            return {"error": "its agent is not known"}
        return self._peers.view(node, request, until, min(LOGS_S, _patience(request) / 3))

    def _on_asked(self, _: PeerConnection, request: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"ok": True, **self._own(request)}

    def _own(self, request: Mapping[str, Any]) -> dict[str, object]:
        try:
            return self._viewed(request)
        except OSError as error:
            return {"error": error.strerror or str(error)}
        except CheckpointError as error:
            return {"error": str(error)}
        except (KeyError, TypeError, ValueError) as error:
            return {"error": f"the request makes no sense: {error!r}"}

    def _viewed(self, request: Mapping[str, Any]) -> dict[str, object]:
        if request["of"] == "stacks":
            options = tuple(one for one in SPY_OPTIONS if one in request["options"])
            taken = self._stacks(options)
            return {"host": os.uname().nodename, **msgspec.to_builtins(taken)}
        if request["of"] == "workers":
            return self._measure()
        if request["of"] == "report":
            return self._report(request["round"])
        if request["of"] == "profile":
            return self._profile(int(request["rank"]), _seconds(request), bool(request["native"]))
        if self._tree is None:
            return {"error": "it keeps no log files: --log-dir /dev/null"}
        if request["of"] == "files":
            return {"files": self._tree.files()}
        most = min(int(request["most"]), MOST_BYTES)
        data = self._tree.read(str(request["name"]), int(request["at"]), most)
        return {"bytes": data.decode("latin-1")}

    def _measure(self) -> dict[str, object]:
        record = cast("Record", self._record())
        workers = record["workers"]
        pids = [one["pid"] for one in workers if one["pid"] and one["state"] == "RUNNING"]
        before, self._measured = usage.measure_since(self._measured, pids)
        used, steps = usage.usage(before, self._measured), progress_of(record, live=True)
        shown = [
            WorkerSeen(one, one["state"], used.get(one["pid"] or 0), steps.get(one["rank"]))
            for one in workers
        ]
        found = {"round": record["round"], "awaited": record.get("awaited")}
        return {**found, "workers": msgspec.to_builtins(shown)}

    def _report(self, number: object) -> dict[str, object]:
        run = RunDir(Path(str(self._record()["dir"])))
        rounds = run.reports()
        chosen = number if number is not None else next(iter(rounds), None)
        answer = {"host": os.uname().nodename, "round": chosen, "text": "", "report": None}
        if type(chosen) is not int or chosen not in rounds:
            return {**answer, "round": None}
        text, report = (run.report(chosen, suffix) for suffix in ("txt", "json"))
        if text.exists():
            answer["text"] = read_limited(text, MOST_REPORT).decode("utf-8", "replace")
        if report.exists():
            answer["report"] = parse_json(read_limited(report, MOST_REPORT), report.name)
        return answer

    def _profile(self, rank: int, seconds: int, native: bool) -> dict[str, object]:
        pid = self._workers.pid(rank)
        if not pid:
            return {"error": f"rank {rank} does not run on {os.uname().nodename}"}
        with tempfile.TemporaryDirectory(prefix=proc.own_prefix(env.SCRATCH)) as place:
            path = Path(place, "profile.svg")
            problem = stacks.record(pid, seconds, path, native)
            if not problem and path.stat().st_size > MOST_SVG:
                problem = f"the graph has more than {MOST_SVG:,} bytes: ask on that node"
            if problem:
                return {"error": problem}
            return {"svg": path.read_text("utf-8", "replace"), "pid": pid}


def _seconds(request: Mapping[str, Any]) -> int:
    return max(1, min(int(request["seconds"]), LONGEST_S))


def _patience(request: Mapping[str, Any]) -> float:
    """Return the seconds that a node has for its answer."""
    more = _seconds(request) if request["of"] == "profile" else 0
    return _PATIENCE[request["of"]] + more
