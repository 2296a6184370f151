"""The agent's end of the server, with a real server below the test process."""

from __future__ import annotations

import inspect
import json
import os
import queue
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from elaunch import proc
from elaunch.agent.children import Reaper
from elaunch.agent.policy import events
from elaunch.agent.workers import server as workerserver
from elaunch.agent.workers.server import ServerPlan, WorkerServer
from elaunch.errors import ServerError
from elaunch.server import loop
from tests.integration.jobs import ACT
from tests.launching import clean_environment, freeze, wait_until

Kind = TypeVar("Kind", bound=events.Event)
Inbox = queue.SimpleQueue[events.Event]
PYTHON = sys.executable


class Rig:
    """A server, what it posts, and a log file for its workers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.inbox: Inbox = queue.SimpleQueue()
        self.reaper = Reaper()
        self.log = directory / "log"
        self.servers: list[WorkerServer] = []

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *error: object) -> None:
        """Close the servers; they have then left nothing."""
        for server in self.servers:
            if server.pid:
                server.close()
                assert server.pid == 0

    def server(self, **changes: Any) -> WorkerServer:
        """Return a server that is not started yet."""
        plan: dict[str, Any] = {
            "run_id": "rig",
            "interpreter": PYTHON,
            "start": "exec",
            "preload": (),
            "later": (),
            "title_room": 0,
            "import_path": None,
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "environ": clean_environment(self.directory),
        }
        made = WorkerServer(ServerPlan(**{**plan, **changes}), self.inbox.put, self.reaper)
        self.servers.append(made)
        return made

    def ready(self, **changes: Any) -> WorkerServer:
        """Start a server and wait until it says that it is ready."""
        made = self.server(**changes)
        made.start()
        assert self.next(events.ServerReady).problem is None
        return made

    def start_worker(
        self, server: WorkerServer, *words: str, rank: int = 0, round: int = 0
    ) -> None:
        """Have a worker started that does what ``words`` say; its output goes to the log."""
        variables = {"RANK": str(rank), "ELAUNCH_ROUND": str(round), "WORLD_SIZE": "1"}
        job = {
            "op": "start",
            "round": round,
            "rank": rank,
            "local_rank": rank,
            "mode": "script",
            "entrypoint": str(ACT),
            "args": words,
            "interpreter": PYTHON,
            "env": variables,
        }
        with self.log.open("ab") as log:
            server.send(job, [log.fileno(), log.fileno()])

    def next(self, kind: type[Kind]) -> Kind:
        """Return the next event, which must be of ``kind``."""
        event = self.inbox.get(timeout=60)
        assert isinstance(event, kind), (
            f"{event}\n{self.log.read_text() if self.log.exists() else ''}"
        )
        return event

    def sweep(self, server: WorkerServer, round: int = 0) -> events.TreeGone:
        """Have all ended and wait for it."""
        order = {"op": "sweep", "round": round, "signum": 0, "grace": 0.0, "deadline": 60.0}
        server.send(order)
        return self.next(events.TreeGone)


def with_rig(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with a Rig in a fork of this process: a reaper takes the ends of all children."""

    def run(tmp_path: Path, **given: object) -> None:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                with Rig(tmp_path) as rig:
                    test(rig, **given)
            except BaseException:
                os.write(write_end, traceback.format_exc().encode())
            finally:
                os._exit(0)
        os.close(write_end)
        with open(read_end) as pipe:
            problem = pipe.read()
        os.waitpid(pid, 0)
        assert not problem, problem

    signature = inspect.signature(test)
    place = signature.parameters["rig"].replace(name="tmp_path")
    others = [each for each in signature.parameters.values() if each.name != "rig"]
    vars(run).update(
        vars(test),
        __doc__=test.__doc__,
        __signature__=signature.replace(parameters=[place, *others]),
    )
    run.__name__ = test.__name__
    return run


@pytest.mark.slow
@pytest.mark.parametrize("start", ["exec", "fork"])
@with_rig
def test_a_worker_is_started_and_its_end_reported(rig: Rig, start: str) -> None:
    """Both with the round and the rank, and with the time on the monotonic clock."""
    server = rig.ready(start=start)
    rig.start_worker(server, "exit=7", rank=5, round=2)
    started = rig.next(events.WorkerStarted)
    ended = rig.next(events.Exit)
    assert (started.round, started.local_rank) == (2, 5)
    assert (ended.round, ended.local_rank, ended.exitcode, ended.stopped) == (2, 5, 7, False)
    assert (started.pid, started.at <= ended.at) == (ended.pid, True)
    assert rig.sweep(server, 2) == events.TreeGone(2)


@with_rig
def test_who_was_told_to_end_is_told_apart(rig: Rig) -> None:
    """One has ended by itself before, and one by a signal that was only forwarded."""
    server = rig.ready()
    rig.start_worker(server, "exit=3", rank=0)
    rig.next(events.WorkerStarted)
    assert rig.next(events.Exit).stopped is False
    for stops in (False, True):
        rig.start_worker(server, "wait", rank=1)
        rig.next(events.WorkerStarted)
        message = {"op": "signal", "signum": int(signal.SIGTERM), "group": False, "stops": stops}
        server.send(message)
        ended = rig.next(events.Exit)
        assert (ended.exitcode, ended.stopped) == (-signal.SIGTERM, stops)


@pytest.mark.slow
@with_rig
def test_groups_are_signalled_also_while_they_are_being_made(rig: Rig) -> None:
    """A worker that was just forked leads no group yet."""
    server = rig.ready()
    for rank in range(10):
        rig.start_worker(server, "wait", rank=rank)
    server.send({"op": "signal", "signum": int(signal.SIGTERM), "group": True, "stops": True})
    seen = [rig.inbox.get(timeout=60) for _ in range(20)]
    ends = [event for event in seen if isinstance(event, events.Exit)]
    assert [event.exitcode for event in ends] == [-signal.SIGTERM] * 10


@pytest.mark.slow
@with_rig
def test_the_sweep_names_what_it_killed(rig: Rig) -> None:
    """What a worker left behind."""
    place = rig.directory / "place"
    place.mkdir()
    server = rig.ready()
    rig.start_worker(server, f"family={place}", "exit=0")
    rig.next(events.WorkerStarted)
    rig.next(events.Exit)
    left = {int(path.read_text()) for path in place.iterdir()}
    assert len(left) == 5
    assert left <= {pid for pid, _ in rig.sweep(server).killed}


@with_rig
def test_a_server_that_dies_is_reported_once(rig: Rig) -> None:
    """And is not there any more; sending to it, killing and closing it do no harm."""
    server = rig.ready()
    os.kill(server.pid, signal.SIGSEGV)
    assert rig.next(events.ServerLost) == events.ServerLost(-signal.SIGSEGV)
    assert server.pid == 0
    server.send({"op": "signal", "signum": 15, "group": False, "stops": True})
    server.kill()
    server.close()
    assert rig.inbox.empty()


@pytest.mark.slow
@with_rig
def test_each_server_is_reported_by_the_one_reaper(rig: Rig) -> None:
    """Also while another child of this process lives, whose end nobody waits for."""
    bystander = rig.reaper.spawn(["sleep", "60"], os.environ, lambda code: None)
    try:
        for _ in range(3):
            server = rig.ready()
            server.kill()
            assert rig.next(events.ServerLost) == events.ServerLost(-signal.SIGKILL)
    finally:
        os.kill(bystander, signal.SIGKILL)


@pytest.mark.slow
@with_rig
def test_a_fence_that_passes_kills_all_workers(rig: Rig) -> None:
    """Also what has left the worker's session; it is not held for the worker's own failure."""
    server = rig.ready()
    rig.start_worker(server, f"family={rig.directory}", "stubborn", "say=up", "wait")
    rig.next(events.WorkerStarted)
    wait_until(lambda: rig.log.exists() and b"up" in rig.log.read_bytes())
    server.send({"op": "fence", "until": time.monotonic() + 0.2})
    assert rig.next(events.Fenced).late < 60
    ended = rig.next(events.Exit)
    assert (ended.exitcode, ended.stopped) == (-signal.SIGKILL, True)
    assert rig.next(events.TreeGone).round == loop.FENCED


@pytest.mark.slow
@with_rig
def test_a_fence_that_is_moved_in_time_holds_nobody_up(rig: Rig) -> None:
    """Each message replaces the last; one that has passed holds for who is started later."""
    server = rig.ready()
    server.send({"op": "fence", "until": time.monotonic() - 1})
    server.send({"op": "fence", "until": time.monotonic() + 60})
    rig.start_worker(server, "say=up", "exit=5")
    rig.next(events.WorkerStarted)
    assert rig.next(events.Exit).exitcode == 5
    assert rig.inbox.empty()
    server.send({"op": "fence", "until": time.monotonic() - 1})
    rig.start_worker(server, "say=up", "wait", round=1)
    rig.next(events.WorkerStarted)
    rig.next(events.Fenced)
    assert rig.next(events.Exit).stopped


@pytest.mark.slow
@with_rig
def test_closing_is_no_loss(rig: Rig) -> None:
    """The workers end with the server, and nobody is told that it was lost."""
    server = rig.ready()
    rig.start_worker(server, "stubborn", "say=up", "wait")
    pid = rig.next(events.WorkerStarted).pid
    wait_until(lambda: rig.log.exists() and b"up" in rig.log.read_bytes())
    server.close()
    assert (server.pid, rig.inbox.empty()) == (0, True)
    assert not Path(f"/proc/{pid}").exists()


@with_rig
def test_closing_does_not_wait_for_imports(rig: Rig) -> None:
    """No worker was started yet: the server is killed in the middle of them."""
    (rig.directory / "slow.py").write_text("import time; time.sleep(110)")
    environ = clean_environment(rig.directory) | {"PYTHONPATH": str(rig.directory)}
    server = rig.server(start="fork", preload=("slow",), environ=environ)
    server.start()
    closer = threading.Thread(target=server.close)
    closer.start()
    closer.join(60)
    assert not closer.is_alive()
    assert server.pid == 0


@pytest.mark.slow
@with_rig
def test_a_server_that_takes_nothing_is_killed(rig: Rig) -> None:
    """It is stopped, and the orders are more than the socket holds."""
    workerserver.SEND_DEADLINE = 1  # of this fork alone
    server = rig.ready()
    freeze(server.pid)
    for _ in range(20):
        server.send({"op": "start", "env": {"X": "x" * 100_000}})
    assert rig.next(events.ServerLost) == events.ServerLost(-signal.SIGKILL)


@pytest.mark.slow
@with_rig
def test_a_server_that_is_stopped_goes_on(rig: Rig) -> None:
    """No end of a worker would be seen otherwise."""
    workerserver.STOPPED_S = 1  # of this fork alone
    server = rig.ready()
    for rank in range(2):  # not only the first time
        rig.start_worker(server, "wait", rank=rank)
        worker = rig.next(events.WorkerStarted).pid
        os.kill(server.pid, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
        assert rig.next(events.Exit).exitcode == -signal.SIGKILL


@with_rig
def test_children_that_were_there_before_are_left_alone(rig: Rig) -> None:
    """As when a shell starts something in the background and then executes elaunch."""
    with subprocess.Popen(["sleep", "60"]) as stranger:
        rig.ready().close()
        assert stranger.poll() is None
        stranger.kill()


@with_rig
def test_an_interpreter_that_is_none(rig: Rig) -> None:
    """An error, at once, with its name."""
    server = rig.server(interpreter="/nowhere/python")
    with pytest.raises(ServerError, match="cannot execute /nowhere/python"):
        server.start()
    assert server.pid == 0


@with_rig
def test_a_module_that_cannot_be_imported(rig: Rig) -> None:
    """The reason comes with the answer."""
    server = rig.server(start="fork", preload=("no_such_module_anywhere",))
    server.start()
    ready = rig.next(events.ServerReady)
    assert "--preload no_such_module_anywhere: ModuleNotFoundError" in (ready.problem or "")


@pytest.mark.slow
@with_rig
def test_a_module_that_computes_when_it_is_imported(rig: Rig) -> None:
    """Its native threads are counted, and it is named; OpenBLAS ends its own before a fork."""
    (rig.directory / "computes.py").write_text(
        "import torch\ntorch.set_num_threads(3)\n(torch.ones(1000, 1000) + 1).sum()\n"
    )
    (rig.directory / "harmless.py").write_text(
        "import numpy\nnumpy.ones((600, 600)) @ numpy.ones((600, 600))\n"
    )
    environ = clean_environment(rig.directory) | {"PYTHONPATH": str(rig.directory)}
    environ |= {"OPENBLAS_NUM_THREADS": "3"}
    for modules in (("harmless",), ("torch", "harmless", "computes")):
        server = rig.server(start="fork", preload=modules, environ=environ)
        server.start()
        ready = rig.next(events.ServerReady)
        assert ready.problem is None
        if "computes" not in modules:
            assert ready.unforkable == ""
        else:
            assert re.match(r"--preload computes: it has started \d other th", ready.unforkable)
        server.close()


@pytest.mark.slow
@with_rig
def test_later_modules_are_left_to_a_script_that_sets_what_they_read(rig: Rig) -> None:
    """Both rounds' workers see their own settings; the agent hears which were in the way."""
    workerserver.LATER_DELAY = 0.5  # of this fork alone
    (rig.directory / "configured.py").write_text(
        "import os\nSETTING = os.environ.get('CONFIGURED', 'default')\n"
    )
    script = rig.directory / "s.py"
    script.write_text(
        "import os, signal\nif os.environ.get('SETS'): os.environ['CONFIGURED'] = 'the script'\n"
        "import configured\nprint(configured.SETTING, flush=True)\nsignal.pause()\n"
    )
    environ = clean_environment(rig.directory) | {"PYTHONPATH": str(rig.directory)}
    for sets in ("yes", ""):
        seen = rig.directory / f"seen{sets}"
        server = rig.ready(start="fork", later=("configured",), environ=environ)
        for number in range(2):
            with seen.open("ab") as log:
                job = {"op": "start", "round": number, "rank": 0, "local_rank": 0, "mode": "script"}
                job |= {"entrypoint": str(script), "args": [], "interpreter": PYTHON}
                server.send({**job, "env": {"SETS": sets}}, [log.fileno(), log.fileno()])
            rig.next(events.WorkerStarted)
            wait_until(lambda: seen.read_text().count("\n") == number + 1, 60)  # noqa: B023
            if number == 0:
                warmed = rig.next(events.ServerWarmed)
                assert (warmed.problem, warmed.settings) == (None, ("CONFIGURED",) if sets else ())
            os.kill(proc.children(server.pid)[0], signal.SIGKILL)
            rig.next(events.Exit)
        server.close()
        assert seen.read_text() == ("the script\n" * 2 if sets else "default\n" * 2)


@pytest.mark.slow
@with_rig
def test_orphans_of_a_dead_server_are_swept_by_the_agent(rig: Rig) -> None:
    """They come to it as a subreaper, and their end is posted like the server's own."""
    place = rig.directory / "place"
    place.mkdir()
    code = f"""
import json, os, queue, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from elaunch.agent.policy import events
from elaunch.server.processes import become_subreaper
from tests.agent.workers.test_server import Rig
become_subreaper()
rig = Rig(Path({str(rig.directory)!r}))
server = rig.ready()
rig.start_worker(server, "family={place}", "say=up", "wait")
rig.next(events.WorkerStarted)
while not rig.log.exists() or b"up" not in rig.log.read_bytes():
    pass
server.kill()
rig.next(events.ServerLost)
server.sweep_orphans(4)
gone = rig.next(events.TreeGone)
print(json.dumps([gone.round, [pid for pid, name in gone.killed], gone.survivors]))
"""

    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    number, killed, survivors = json.loads(done.stdout)
    assert (number, survivors) == (4, [])
    left = {int(path.read_text()) for path in place.iterdir()}
    assert left <= set(killed)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))


@with_rig
def test_a_sweep_that_fails_is_over_all_the_same(rig: Rig) -> None:
    """The loop has no deadline beside the event: without it, it would wait for ever."""
    server = rig.ready()
    server.kill()
    rig.next(events.ServerLost)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))  # /proc cannot be read any more
    try:
        server.sweep_orphans(4)
        gone = rig.next(events.TreeGone)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert gone == events.TreeGone(4)


@with_rig
def test_the_reaper_hears_of_a_child_that_ends_at_once(rig: Rig) -> None:
    """Again and again, also when there was no child at all in between."""
    codes: queue.SimpleQueue[int] = queue.SimpleQueue()
    for code in range(5):
        rig.reaper.spawn(["sh", "-c", f"exit {code}"], os.environ, codes.put)
        assert codes.get(timeout=60) == code


@with_rig
def test_devices_are_counted_by_the_server(rig: Rig) -> None:
    """Without torch the interpreter is asked, which may have none."""
    fake = rig.directory / "python"
    fake.write_text("#!/bin/sh\necho '[3, null]'\n")
    fake.chmod(0o755)
    server = rig.ready()
    server.send({"op": "count_devices", "kind": "gpu", "interpreter": str(fake)})
    assert rig.next(events.DevicesCounted) == events.DevicesCounted(3, None)


@with_rig
def test_a_store_that_waits_for_its_host_is_dropped_with_its_round(rig: Rig) -> None:
    """Nobody has connected; the socket is free again at once."""
    server = rig.ready()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        store = {"op": "store", "round": 0, "host": "127.0.0.1", "fixed": False}
        server.send(store, [listening.fileno()])
        rig.sweep(server)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)
