"""What a command sees of all nodes through one agent: real sockets, between agents too."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from elaunch import env
from elaunch.agent.hangs import stacks
from elaunch.agent.hangs.living import Living
from elaunch.agent.hangs.stackdump import StackGroup
from elaunch.agent.peers import messages
from elaunch.agent.peers.peers import Peers
from elaunch.agent.policy.events import StacksTaken
from elaunch.agent.policy.turn import Round
from elaunch.agent.status import views
from elaunch.agent.status.socket import ControlSocket
from elaunch.agent.status.views import NodeViews
from elaunch.errors import UsageError
from elaunch.runs.directory import RunDir
from elaunch.runs.job import AgentState, JobDocument, NodeSeen, round_nodes
from elaunch.runs.logtree import Arrival
from elaunch.runs.record import first_record, new_worker
from elaunch.views.agents import (
    RemoteTree,
    answer_of,
    ask,
    profile_of,
    stacks_of,
)
from elaunch.views.read import AskedNodes
from tests.agent.peersrig import agents, tell
from tests.threadless import no_threads

PIDS: dict[int, int] = {}
RECORDS: dict[int, dict[str, Any]] = {}
HELD: dict[int, threading.Event] = {}
WAITS, LOADS = ("all_reduce", "step"), ("load", "step")


def taken(groups: dict[tuple[int, ...], tuple[str, ...]]) -> StacksTaken:
    """Return stacks of a node."""
    return StacksTaken(0, tuple(StackGroup(ranks, main) for ranks, main in groups.items()))


def record_of(node: int) -> dict[str, Any]:
    """Return the record of a node, when it is no longer held."""
    if held := HELD.get(node):
        held.wait(30)
    return RECORDS.get(node, {})


@contextmanager
def job(tmp_path: Path, *nodes: StacksTaken | None) -> Iterator[tuple[RunDir, list[Peers]]]:
    """Yield the run of node 0's agent, whose peers are the others; of None the agent is too old."""
    with ExitStack() as stack:
        made = stack.enter_context(agents(len(nodes)))
        plan = tell(made)
        run = RunDir(tmp_path)
        run.write_state(first_record("j", "j", tmp_path))
        for number, stacks in enumerate(nodes):
            begun = Round(0, 1, plan=plan, name=f"a{number}")
            workers: Any = SimpleNamespace(now=Living(begun), pid=lambda rank: PIDS.get(rank, 0))
            served = NodeViews(
                *(workers, lambda _, own=stacks: own),
                *(tmp_path / f"logs{number}", partial(record_of, number)),
                watched=True,
            )
            if stacks is not None:
                served.meet(made[number])
            if number == 0:
                control = ControlSocket(run.socket, dict, view=served.serve)
                control.start()
                stack.callback(control.close)
        yield run, made


def test_ranks_of_all_nodes_are_grouped_the_outliers_first(tmp_path: Path) -> None:
    """Equal stacks of several nodes are one group; a node that is silent is named."""
    first, second = taken({(0, 1): WAITS}), taken({(2,): WAITS, (3,): LOADS})
    with job(tmp_path, first, second, None) as (run, made):
        found = stacks_of(run, ())
        assert [(one.ranks, one.main) for one in found.groups] == [
            ((3,), LOADS),
            ((0, 1, 2), WAITS),
        ]
        ((node, why),) = found.silent
        assert node == 2 and "does not serve 'view'" in why
        made[1].close()
        assert [node for node, _ in stacks_of(run, ()).silent] == [1, 2]
    with pytest.raises(UsageError, match="RUN j does not run: `elaunch status j` tells how"):
        stacks_of(run, ())


def test_log_files_of_another_node_are_read(tmp_path: Path) -> None:
    """Byte by byte; nothing but log files."""
    with job(tmp_path, taken({}), taken({})) as (run, _):
        place = tmp_path / "logs1" / "attempt_0"
        (place / "0").mkdir(parents=True)
        (place / "0" / "stdout.log").write_bytes(bytes(range(256)) * 4096)
        (place / "arrivals").write_bytes(Arrival(1.0, 5, 0, "stdout", 0).line())
        (tmp_path / "logs1" / "secret").write_text("x")
        tree = RemoteTree(run, 1)
        assert {name: size for name, (size, _) in tree.files().items()} == {
            "attempt_0/0/stdout.log": 1 << 20,
            "attempt_0/arrivals": 19,
        }
        assert tree.read("attempt_0/0/stdout.log", 250, 10) == bytes([*range(250, 256), 0, 1, 2, 3])
        assert len(tree.read("attempt_0/0/stdout.log", 0, 1 << 30)) == 1 << 18
        for name in ("secret", "../state.json", "attempt_0/0/../../secret", "/etc/passwd"):
            with pytest.raises(OSError, match="is no log file"):
                tree.read(name, 0, 10)
        with pytest.raises(ConnectionError, match="not in the round"):
            RemoteTree(run, 7).files()


@pytest.mark.slow
def test_workers_of_other_nodes_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what they take; of another round none, and of a node that is silent the last ones."""
    worker = new_worker(1, 0) | {"pid": os.getpid(), "state": "RUNNING"}
    monkeypatch.setitem(RECORDS, 1, {"round": 3, "workers": [worker]})
    with job(tmp_path, taken({}), taken({}), None, taken({})) as (run, made):
        hosts = [{"name": f"a{n}", "host": f"h{n}", "addr": "", "slots": 1} for n in range(4)]
        record: Any = first_record("j", "j", tmp_path) | {
            "nodes": hosts,
            "node_rank": 0,
            "round": 3,
        }
        others = AskedNodes(run)

        def read(
            seen: Any,
            asked: tuple[int, ...] | None,
            agent: AgentState = "answers",
            by: Any = others,
        ) -> tuple[NodeSeen, ...]:
            job = JobDocument(run, seen, seen["state"], None, agent, 0.0, nodes=round_nodes(seen))
            assert job.others and not structs.replace(job, agent="elsewhere").others
            found: JobDocument = by.complete(job, asked, 5)
            return found.others

        assert not any(one.note or one.workers for one in read(record, ()))
        seen, old, older = read(record, None)
        assert (seen.number, seen.host, seen.note) == (1, "h1", "")
        (shown,) = seen.workers
        assert shown.record == worker and shown.usage is not None and shown.usage.rss > 1 << 20
        assert "does not serve 'view'" in old.note and "makes no sense" in older.note
        next_round: Any = {**record, "round": 4}
        (later, *_) = read(next_round, ())
        assert not later.workers and not later.note
        (later, *_) = read(next_round, (1,))
        assert not later.workers and later.note == "it is in round 3"
        monkeypatch.setitem(RECORDS, 1, RECORDS[1] | {"round": 4})
        (later, *_) = read(next_round, ())
        assert later.workers and not later.note, "its problem is over"
        monkeypatch.setitem(RECORDS, 1, RECORDS[1] | {"round": 3})
        (seen, *_) = read(record, (1,))
        assert seen.workers and not seen.note
        monkeypatch.setitem(HELD, 3, threading.Event())
        seen, _, frozen = read(record, None, by=AskedNodes(run))
        HELD[3].set()
        assert seen.workers and not seen.problem and " does not answer" in frozen.note
        (unasked, *_) = read(record, (1,), "stopped")
        assert [one.record for one in unasked.workers] == [worker]
        assert re.match(r"seen \d.* ago: the agent of this node, ", unasked.note)
        (unasked, *_) = read(record, ())
        assert not unasked.note, "that was so at that reading"
        made[1].close()
        (silent, *_) = read(record, (1,))
        assert [one.record for one in silent.workers] == [worker]
        assert re.match(r"seen \d.* ago: \S", silent.note)


@pytest.mark.slow
def test_frozen_nodes_leave_time_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose handshake the kernel begins and no agent ends; what was not asked says so."""
    monkeypatch.setattr(messages, "ASKED_AT_ONCE", 1)
    monkeypatch.setitem(views._PATIENCE, "workers", 3.0)
    for number in (0, 3, 5):
        monkeypatch.setitem(RECORDS, number, {"round": 0, "workers": []})
    with (
        job(tmp_path, *[taken({})] * 6) as (run, made),
        socket.create_server(("127.0.0.1", 0)) as frozen,
    ):
        plan = tell(made)
        port = frozen.getsockname()[1]
        nodes = tuple(
            structs.replace(node, peer_port=port) if number in (1, 2, 4) else node
            for number, node in enumerate(plan.nodes)
        )
        made[0].on_plan(structs.replace(plan, nodes=nodes), "a0")
        found = ask(run, {"of": "workers"}, 5)
        assert found[3]["workers"] == [] == found[0]["workers"], "it was asked"
        assert "no answer" in found[1]["error"] and "no answer" in found[2]["error"]
        assert found[5]["error"] == "it was not asked in time"


def test_what_makes_no_sense_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And more at a time than there is room for."""
    with job(tmp_path, taken({})) as (run, _):
        with pytest.raises(UsageError, match="'of' is 'x', known: 'stacks', 'report', 'files',"):
            ask(run, {"of": "x"}, 5)
        for request in ({"of": "bytes"}, {"of": "bytes", "name": 3, "at": "x", "most": None}):
            assert "makes no sense" in ask(run, request, 5)[0]["error"]
        assert "makes no sense" in ask(run, {"of": "stacks"}, 5)[0]["error"]
    monkeypatch.setattr(views, "MOST", 0)
    (tmp_path / "full").mkdir()
    with job(tmp_path / "full", taken({})) as (run, _), pytest.raises(UsageError, match="0 such"):
        ask(run, {"of": "files"}, 5)


def test_no_thread_for_an_answer(tmp_path: Path) -> None:
    """The command is told so, and there is as much room as before when threads can be had."""
    with job(tmp_path, taken({})) as (run, _):
        with no_threads():
            for _ in range(2 * views.MOST):
                with pytest.raises(UsageError, match="cannot answer for now: can't start new"):
                    ask(run, {"of": "stacks"}, 5)
        assert "makes no sense" in ask(run, {"of": "bytes"}, 5)[0]["error"]


@pytest.mark.slow
def test_a_rank_of_another_node_is_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its agent; where it cannot, its host is named, and nothing is written."""
    path = tmp_path / "x.svg"
    busy = "print('up', flush=True)\nwhile True: sum(range(1000))\n"

    def problem() -> str:
        pid, why = profile_of(run, 1, 1, path, False)
        assert (pid, path.exists()) == (0, False) and "node1" in why
        return why

    with (
        job(tmp_path, taken({}), taken({})) as (run, _),
        subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        assert f"rank 1 does not run on {os.uname().nodename}" in problem()
        monkeypatch.setitem(PIDS, 1, process.pid)
        assert profile_of(run, 1, 1, path, False) == (process.pid, "")
        assert "<svg" in path.read_text()
        path.unlink()
        monkeypatch.setattr(views, "MOST_SVG", 10)
        assert "the graph has more than 10 bytes: ask on that node" in problem()
        process.kill()
        monkeypatch.setattr(stacks, "py_spy", lambda: None)
        assert stacks.NO_PY_SPY in problem()
        with pytest.raises(UsageError, match="must be numbers"):
            ask(run, {"of": "profile", "rank": "x"}, 5)


def test_a_debugger_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it would find nothing, or where other nodes would take the wait for a hang."""

    def refused(run: RunDir, rank: object) -> str:
        asked = {"op": "view", "of": "debug", "rank": rank, "run": "j"}
        return str(answer_of(run, asked, 5)["refused"])

    with job(tmp_path, taken({}), taken({})) as (run, _):
        assert refused(run, 2) == "--rank 2 is none of 0 to 1"
        assert refused(run, "x") == "--rank x is none of 0 to 1"
        assert refused(run, 1).startswith("rank 1 runs on node 1, ")
        assert refused(run, 1).endswith(": type `elaunch debug j --rank 1` there")
        assert refused(run, 0).startswith("rank 0 does not run now: `elaunch status j` tells")
        monkeypatch.setitem(PIDS, 0, os.getpid())
        assert refused(run, 0).startswith("with --hang-timeout on several nodes")
    monkeypatch.setattr(Round, "place", env.only_node("", 1))
    with job(tmp_path, taken({})) as (run, _):
        assert refused(run, 0).startswith("rank 0 is no fork of the server")
