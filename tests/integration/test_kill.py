"""Nothing survives: not the agent's death, not the server's, not a worker's, whatever it left.

The fixture fails a test whose command ended and left a process behind.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.jobs import ATTENTIVE, COLLECTIVE, FORK, SPAWN, both_methods
from tests.integration.watching import (
    Clock,
    act,
    server_of,
    state_of,
    store_host_of,
    wait_for_workers,
    wait_until_gone,
)
from tests.launching import Launcher, Running, freeze, wait_until

pytestmark = pytest.mark.slow

Method = Sequence[str]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return an empty directory for the workers of one test."""
    path = tmp_path / "place"
    path.mkdir()
    return path


def start_families(
    elaunch: Launcher, method: Method, place: Path, *words: str, flags: Sequence[str] = ()
) -> Running:
    """Start two workers with descendants of every kind, and wait until all are there."""
    running = elaunch.start(
        act(method, f"kin={place}", f"family={place}", "say=up", *words, flags=flags)
    )
    wait_for_workers(running)
    return running


# ── the agent and the server are killed ──────────────────────────────────────────────────────────


@both_methods
def test_the_agent_is_killed(elaunch: Launcher, method: Method, place: Path) -> None:
    """Everything goes with it: workers, children, daemons, those that ignore SIGTERM."""
    running = start_families(elaunch, method, place, "wait")
    assert len(elaunch.leftovers()) > 12
    running.send_signal(signal.SIGKILL)
    wait_until_gone(elaunch)


def test_the_agents_process_group_is_killed(elaunch: Launcher, place: Path) -> None:
    """As a job control shell or a batch system does it."""
    running = start_families(elaunch, FORK, place, "wait")
    os.killpg(running.pid, signal.SIGKILL)
    wait_until_gone(elaunch)


def test_the_agent_is_killed_while_the_server_imports(elaunch: Launcher, place: Path) -> None:
    """The server is in an import that takes its time."""
    (place / "slow.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(110)\n")
    running = elaunch.start(
        act(("--preload", "slow"), "wait"), env={"PYTHONPATH": str(place)}, cwd=place
    )
    running.wait_for_line("importing")
    running.send_signal(signal.SIGKILL)
    wait_until_gone(elaunch)


@pytest.mark.parametrize("nproc", [2, pytest.param("auto", marks=pytest.mark.trial)])
def test_the_server_is_killed_while_it_imports(
    elaunch: Launcher, place: Path, nproc: int | str
) -> None:
    """No worker was there yet: another server is started, as often as there are restarts.

    It also counts the devices, where the first one was to do that.
    """
    lines = ["import os, time", "print('importing', flush=True)"]
    lines += ["os.path.exists('go') or time.sleep(110)"]
    (place / "slow.py").write_text("\n".join(lines))
    flags = ["--max-restarts=1"]
    words = act(("--preload", "slow"), "say=up", nproc=nproc, flags=flags)
    running = elaunch.start(words, env={"PYTHONPATH": str(place)}, cwd=place)
    running.wait_for_line("importing")
    (place / "go").touch()
    os.kill(server_of(running), signal.SIGKILL)
    done = running.wait()
    assert done.returncode == 0, done.stderr
    assert "before it was ready; starting another: restart 1 of 1" in done.stderr
    assert "up" in done.stdout


@both_methods
def test_the_server_is_killed(elaunch: Launcher, method: Method, place: Path) -> None:
    """The round fails, the report names the server, nothing is left."""
    running = start_families(elaunch, method, place, "wait")
    os.kill(server_of(running), signal.SIGKILL)
    done = running.wait()
    assert done.returncode == 71
    assert "the server that starts the workers was killed by SIGKILL" in done.stderr
    assert "Traceback" not in done.stderr


@both_methods
def test_a_server_that_was_killed_is_replaced(
    elaunch: Launcher, method: Method, place: Path
) -> None:
    """Twice, so that the second one's end is noticed too; the old tree is dead each time."""
    flags = ["--max-restarts=3", "--sibling-grace=0.3"]
    running = start_families(elaunch, method, place, "r2:exit=0", "wait", flags=flags)
    for number in range(2):
        wait_for_workers(running, round=number)
        os.kill(server_of(running), signal.SIGKILL)
    done = running.wait()
    assert done.returncode == 0, done.stderr
    assert "alive" not in done.stdout
    assert "was killed by SIGKILL; restart 1 of 3" in done.stderr


@pytest.mark.trial
def test_a_server_that_hangs_is_killed_in_the_end(elaunch: Launcher, place: Path) -> None:
    """It is stopped: it can neither pass signals on nor end anything."""
    flags = ["--shutdown-timeout=0.2", "--sibling-grace=0.2"]
    running = start_families(elaunch, SPAWN, place, "wait", flags=flags)
    freeze(server_of(running))
    running.send_signal(signal.SIGTERM)
    done = running.wait()
    assert "does not answer; killing it" in done.stderr
    assert done.returncode == 71


@pytest.mark.trial
def test_a_worker_that_ends_while_the_server_is_stopped(elaunch: Launcher, place: Path) -> None:
    """The server is continued, and reports it."""
    running = start_families(elaunch, SPAWN, place, "wait")
    pid, _ = wait_for_workers(running)
    freeze(server_of(running))
    os.kill(pid, signal.SIGKILL)
    said = elaunch.run(["top", "--json"]).stdout
    assert '"title": "the server that starts the workers (pid ' in said
    done = running.wait()
    assert "has been stopped by a signal (SIGSTOP) for 20 s, so that no end of a" in done.stderr
    assert done.returncode == 137


@pytest.mark.trial
def test_a_worker_that_ends_while_the_server_is_frozen(
    elaunch: Launcher, place: Path, freezer: Path
) -> None:
    """Nothing reports that but the kernel; the server is killed, and a round follows it."""
    flags = ["--max-restarts=1", "--sibling-grace=0.3", "--run-id=job"]
    words = act(SPAWN, f"meet={place}", "say=up", "r0:wait", flags=flags)
    running = elaunch.start_command([sys.executable, str(ATTENTIVE), *words])
    pid, _ = wait_for_workers(running)
    (freezer / "cgroup.procs").write_text(str(server_of(running)))
    (freezer / "freezer.state").write_text("FROZEN")
    os.kill(pid, signal.SIGKILL)
    running.wait_for_line(
        rf"rank 0 \(pid {pid}\) has ended, and the server that starts the workers \(pid \d+\) does "
        "not report it: the process is frozen by its cgroup",
        stream="stderr",
    )
    said = elaunch.run(["status", "job"]).stdout
    assert "attention: the server that starts the workers (pid " in said and "frozen" in said
    running.wait_for_line(
        "the server that starts the workers does not answer; killing it", stream="stderr"
    )
    (freezer / "freezer.state").write_text("THAWED")
    done = running.wait()
    assert done.returncode == 0, done
    assert "round 0: rank 0 was killed by SIGKILL; stopping the other 1 worker" in done.stderr
    assert "rank 0 was killed by SIGKILL; restart 1 of 1" in done.stderr


@pytest.mark.trial
def test_workers_of_a_frozen_server_are_killed(elaunch: Launcher, freezer: Path) -> None:
    """It can neither signal nor end them, and does not die itself before it is thawed."""
    flags = ["--shutdown-timeout=0.3", "--run-id=job"]
    words = act(SPAWN, "say=up", "wait", flags=flags)
    running = elaunch.start(words)
    pids = wait_for_workers(running)
    (freezer / "cgroup.procs").write_text(str(server_of(running)))
    (freezer / "freezer.state").write_text("FROZEN")
    running.send_signal(signal.SIGTERM)
    running.wait_for_line("does not answer; killing it", stream="stderr")
    wait_until(lambda: {state_of(pid) for pid in pids} == {"Z"}, what="the workers are killed")
    (freezer / "freezer.state").write_text("THAWED")
    assert running.wait().returncode == 71


# ── workers end, and leave others behind ─────────────────────────────────────────────────────────


@pytest.mark.trial
@both_methods
def test_what_a_failed_worker_left(elaunch: Launcher, method: Method, place: Path) -> None:
    """And what its sibling left, which was stopped."""
    running = start_families(elaunch, method, place, f"meet={place}", "1:exit=7", "wait")
    assert running.wait().returncode == 7


@both_methods
def test_what_workers_left_that_ended_with_0(
    elaunch: Launcher, method: Method, place: Path
) -> None:
    """It gets SIGTERM and the siblings' grace, and is named when it was killed."""
    running = start_families(elaunch, method, place, flags=["--sibling-grace=0.3"])
    assert running.wait().returncode == 0


def test_the_old_tree_is_dead_before_the_next_round(elaunch: Launcher, place: Path) -> None:
    """A worker of round 1 finds no process of round 0."""
    flags = ["--max-restarts=1", "--sibling-grace=0.3"]
    words = [f"meet={place}", "1r0:exit=7", "r0:wait"]
    running = start_families(elaunch, FORK, place, *words, flags=flags)
    done = running.wait()
    assert done.returncode == 0
    assert "round=1" in done.stdout
    assert "alive" not in done.stdout


@both_methods
def test_a_stubborn_sibling_is_killed_after_its_grace(
    elaunch: Launcher, method: Method, place: Path
) -> None:
    """Not after the time that a user's own signal gives it."""
    clock = Clock()
    words = ["0:stubborn", "say=up", f"meet={place}", "1:exit=5", "wait"]
    flags = ["--sibling-grace=0.5", "--shutdown-timeout=300"]
    done = elaunch.run(act(method, *words, flags=flags))
    assert done.returncode == 5
    assert clock() > 0.5
    assert "the grace is over; killing 1 worker" in done.stderr
    assert "Stopped by elaunch: rank 0 (SIGKILL)" in done.stderr


def test_a_sibling_that_saves_has_the_time(elaunch: Launcher, place: Path) -> None:
    """It is told by SIGTERM when the other one fails."""
    words = [f"0:save={place}/saved,0.3", f"meet={place}", "1:exit=5", "wait"]
    assert elaunch.run(act(FORK, *words)).returncode == 5
    assert (place / "saved").read_text() == "saved"


def test_a_stopped_worker_takes_its_signal(elaunch: Launcher, place: Path) -> None:
    """It is continued for it; the grace is not waited for."""
    words = [f"meet={place}", "0:say=up", f"1:until={place}/go", "1:exit=5", "wait"]
    running = elaunch.start(
        act(FORK, *words, flags=["--sibling-grace=300", "--shutdown-timeout=300"])
    )
    (pid,) = wait_for_workers(running, nproc=1)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state_of(pid) == "T")
    (place / "go").touch()
    assert running.wait().returncode == 5


def test_a_worker_that_was_stopped_and_continued_goes_on(elaunch: Launcher, place: Path) -> None:
    """Stopping is no failure."""
    running = elaunch.start(act(FORK, "say=up", f"until={place}/go", nproc=1))
    (pid,) = wait_for_workers(running, nproc=1)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state_of(pid) == "T")
    (place / "go").touch()
    os.kill(pid, signal.SIGCONT)
    assert running.wait().returncode == 0


def test_an_agent_that_was_stopped_and_continued_goes_on(elaunch: Launcher, place: Path) -> None:
    """A worker fails meanwhile; that is noticed afterwards."""
    words = ["say=up", f"until={place}/go", "1:exit=6", "wait"]
    running = elaunch.start(act(FORK, *words))
    _, pid = wait_for_workers(running)
    running.send_signal(signal.SIGSTOP)
    wait_until(lambda: state_of(running.pid) == "T")
    (place / "go").touch()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="rank 1 has ended")
    running.send_signal(signal.SIGCONT)
    assert running.wait().returncode == 6


def test_a_process_that_forks_all_the_time_is_caught(elaunch: Launcher, place: Path) -> None:
    """Every 5 ms a new one, in the moment of the sweep."""
    running = elaunch.start(act(FORK, "bomb", "say=up", f"until={place}/go", "exit=4", nproc=1))
    wait_for_workers(running, nproc=1)
    (place / "go").touch()
    assert running.wait().returncode == 4


@pytest.mark.parametrize("count", [16, pytest.param(64, marks=pytest.mark.trial)])
def test_one_of_many_workers_fails(elaunch: Launcher, count: int) -> None:
    """At once, while others are still being started; all are gone."""
    flags = ["--sibling-grace=300"]
    done = elaunch.run(act(FORK, "7:exit=9", "wait", nproc=count, flags=flags))
    assert done.returncode == 9
    assert f"stopping the other {count - 1} workers" in done.stderr


# ── --shutdown-timeout holds on every path ───────────────────────────────────────────────────────


@both_methods
def test_workers_that_ignore_sigterm(elaunch: Launcher, method: Method) -> None:
    """They are killed when the time is over; a second SIGTERM changes nothing."""
    running = elaunch.start(
        act(method, "stubborn", "say=up", "wait", flags=["--shutdown-timeout=3"])
    )
    wait_for_workers(running)
    clock = Clock()
    running.send_signal(signal.SIGTERM)
    running.wait_for_line("SIGTERM received: forwarded to the workers, grace 3 s", stream="stderr")
    already = "the workers are being stopped already"
    running.send_again(signal.SIGTERM, lambda: already in running.output("stderr"))
    assert running.wait().returncode == 143
    assert clock() >= 3.0


def test_the_timeout_is_the_workers_and_their_childrens_together(
    elaunch: Launcher, place: Path
) -> None:
    """A worker takes most of it to save and leaves a child that ignores SIGTERM."""
    words = [f"family={place}", f"save={place}/saved,5", "say=up", "wait"]
    running = elaunch.start(act(FORK, *words, nproc=1, flags=["--shutdown-timeout=8"]))
    wait_for_workers(running, nproc=1)
    clock = Clock()
    running.send_signal(signal.SIGTERM)
    assert running.wait().returncode == 143
    assert 8.0 <= clock() < 12.5  # and not 5 + 8
    assert (place / "saved").exists()


def test_sigint_twice_kills_at_once(elaunch: Launcher, place: Path) -> None:
    """Whatever the time was meant to be."""
    flags = ["--shutdown-timeout=300"]
    running = start_families(elaunch, FORK, place, "stubborn", "say=deaf", "wait", flags=flags)
    running.wait_for_line("deaf rank=0")
    running.wait_for_line("deaf rank=1")
    running.send_signal(signal.SIGINT)
    running.wait_for_line("SIGINT received", stream="stderr")
    running.send_again(signal.SIGINT, lambda: running.process.poll() is not None)
    assert running.wait().returncode == 130


def test_sigint_twice_kills_what_the_workers_left_at_once(elaunch: Launcher, place: Path) -> None:
    """The workers themselves had ended at the first one."""
    running = start_families(elaunch, FORK, place, "wait", flags=["--shutdown-timeout=300"])
    pids = wait_for_workers(running)
    running.send_signal(signal.SIGINT)
    wait_until(lambda: not {*pids} & {*elaunch.leftovers()}, what="both workers have ended")
    running.send_again(signal.SIGINT, lambda: running.process.poll() is not None)
    assert running.wait().returncode == 130


def test_sigterm_in_the_backoff(elaunch: Launcher) -> None:
    """The failure that led to it is what the job ends with; the backoff is one of minutes."""
    code = "from elaunch.rendezvous.decide import budget; from elaunch.__main__ import main; "
    code += "budget.BACKOFF_FIRST = budget.BACKOFF_MOST = 600.0; exit(main())"
    words = act(SPAWN, "1:exit=3", "wait", flags=["--max-restarts=99"])
    running = elaunch.start_command([sys.executable, "-c", code, *words])
    running.wait_for_line(r"restart \d+ of 99, after a backoff of up to 600 s", stream="stderr")
    running.send_signal(signal.SIGTERM)
    done = running.wait()
    assert done.returncode == 3
    assert "rank 1 exited with code 3; no restart after SIGTERM" in done.stderr


def test_sigterm_while_the_server_imports(elaunch: Launcher, place: Path) -> None:
    """No worker was there yet."""
    (place / "slow.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(110)\n")
    words = act(("--preload", "slow"), "wait", flags=["--shutdown-timeout=300"])
    running = elaunch.start(words, env={"PYTHONPATH": str(place)}, cwd=place)
    running.wait_for_line("importing")
    running.send_signal(signal.SIGTERM)
    done = running.wait()
    assert done.returncode == 143
    assert re.search(r" round 0: stopped by SIGTERM\b", done.stderr)


@pytest.mark.executed
def test_sigterm_while_the_devices_are_counted(elaunch: Launcher) -> None:
    """torch is being imported for it in a process of its own."""
    flags = ["--run-id=counting", "--shutdown-timeout=300"]
    running = elaunch.start(["run", *SPAWN, "--nproc-per-node", "auto", *flags, COLLECTIVE])
    wait_until(lambda: len(elaunch.leftovers()) >= 3, what="the counting process runs")
    running.send_signal(signal.SIGTERM)
    done = running.wait()
    assert done.returncode == 143
    assert re.search(r" round 0: stopped by SIGTERM\b", done.stderr)
    assert '"STOPPED"' in elaunch.run(["status", "--json", "counting"]).stdout


@pytest.mark.trial
@pytest.mark.executed
def test_the_agent_is_killed_while_the_devices_are_counted(elaunch: Launcher) -> None:
    """Neither the server nor the counting process stays."""
    running = elaunch.start(["run", *SPAWN, "--nproc-per-node", "auto", COLLECTIVE])
    wait_until(lambda: len(elaunch.leftovers()) >= 3, what="the counting process runs")
    running.send_signal(signal.SIGKILL)
    wait_until_gone(elaunch)


@both_methods
def test_sigterm_between_the_forks(elaunch: Launcher, method: Method) -> None:
    """Some of many workers run already, others are yet to be forked."""
    flags = ["--shutdown-timeout=300"]
    running = elaunch.start(act(method, "say=up", "wait", nproc=48, flags=flags))
    running.wait_for_line("up rank=")
    running.send_signal(signal.SIGTERM)
    assert running.wait(100).returncode == 143


def test_commands_are_ended_with_the_shell_around_them(elaunch: Launcher, place: Path) -> None:
    """The program below the shell gets the SIGTERM, too, and has the time to save."""
    program = f"trap 'sleep 0.2; echo saved > {place}/saved.$RANK; exit 0' TERM; echo up; "
    command = f'sh -c "{program} while :; do sleep 0.05; done"; echo never'
    running = elaunch.start(["run", "--nproc-per-node=2", "--no-python", "sh", "-c", command])
    wait_until(lambda: running.output().count("up\n") == 2)
    running.send_signal(signal.SIGTERM)
    done = running.wait()
    assert done.returncode == 143
    assert sorted(path.name for path in place.iterdir()) == ["saved.0", "saved.1"]


# ── the store ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_store_host_is_gone(
    elaunch: Launcher, place: Path, number: signal.Signals, free_port: int
) -> None:
    """The next round has another one, on the same port."""
    flags = ["--max-restarts=1", f"--master-port={free_port}"]
    words = [f"r0:meet={place}", "r0:say=up", f"r0:until={place}/go", "1r0:exit=3", "r0:wait"]
    wrapper = place / "act_then_reduce.py"
    wrapper.write_text(
        "import os, runpy, sys\n"
        f"sys.path.insert(0, {str(COLLECTIVE.parent)!r})\n"
        "if os.environ['ELAUNCH_ROUND'] == '0':\n"
        "    import act\n"
        "    act.main(sys.argv[1:])\n"
        f"sys.argv[1:] = [{str(place)!r}, '1']\n"
        f"runpy.run_path({str(COLLECTIVE)!r}, run_name='__main__')\n"
    )
    running = elaunch.start(["run", "--nproc-per-node=2", *flags, wrapper, *words])
    wait_for_workers(running)
    os.kill(store_host_of(running), number)
    (place / "go").touch()
    done = running.wait()
    assert done.returncode == 0, done.stderr
    assert f"reduced rank=1 round=1 port={free_port}" in done.stdout
