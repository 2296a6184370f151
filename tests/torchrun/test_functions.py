"""``elaunch.run``: a function in each worker, from a script and from where there is no file."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

import elaunch as package
from tests.launching import Launcher, free_port, wait_until

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, elaunch

def rank(more):
    print("in", os.environ["RANK"], flush=True)
    return int(os.environ["RANK"]) + more, "torch" in sys.modules

def fails():
    raise LookupError("of the worker")

if __name__ == "__main__":
    print(elaunch.run(rank, 10, nproc=2, role="mine"))
    try:
        elaunch.run(fails, preload=["none"])
    except Exception as error:
        print(type(error).__name__, "LookupError: of the worker" in str(error))
    try:
        elaunch.run(fails, nnodes="3:1")
    except elaunch.ElaunchError as error:
        print(type(error).__name__, str(error)[:8])
"""
NO_FILE = """
import os, elaunch
print(elaunch.run(lambda: int(os.environ["RANK"]) + len(os.listdir()), nproc=2))
"""


THREAD = """
import elaunch, os, signal, threading, time
signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the program itself
def job():
    try:
        elaunch.run(waits)
    except BaseException as error:
        print(type(error).__name__, error.sigval.name)
def waits():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.write(1, b"in\\n")
    time.sleep(60)
thread = threading.Thread(target=job)
thread.start()
thread.join()
"""
LOST = """
import elaunch, os, time
def waits():
    server = os.getppid()
    with open(f"/proc/{server}/stat") as stat:
        agent = int(stat.read().rpartition(")")[2].split()[1])
    os.write(1, b"of %d %d\\n" % (server, agent))
    time.sleep(60)
try:
    elaunch.run(waits, max_restarts=1)
except BaseException as error:
    print(type(error).__name__, "the fork of the program" in str(error), str(error)[:33])
"""
OTHER_THREAD = """
import elaunch, os, signal, sys, threading, time
def waits():
    open(sys.argv[1], "w").close()
    time.sleep(60)
def interrupt():
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    elaunch.run(waits)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_function_of_a_script(elaunch: Launcher) -> None:
    """By its name, in forks of a process that has torch; errors are torch's and elaunch's."""
    script = elaunch.directory / "script.py"
    script.write_text(SCRIPT)
    done = elaunch.start_command([sys.executable, script]).wait()
    lines = done.stdout.splitlines()
    assert sorted(lines[:2]) == ["in 0", "in 1"]
    assert lines[2:] == [
        "{0: (10, True), 1: (11, True)}",
        "ChildFailedError True",
        "UsageError --nnodes",
    ], done.stderr
    assert " failed at " in done.stderr


def test_a_script_without_its_guard(elaunch: Launcher) -> None:
    """Each worker imports the script: it started a job of its own there, by fork, and went on."""
    script = elaunch.directory / "script.py"
    script.write_text("import elaunch, os\nprint('ended', elaunch.run(os.getpid, nproc=1))\n")
    env = {"ELAUNCH_PRELOAD": "none"}  # the server would import torch for nothing
    done = elaunch.start_command([sys.executable, script], env=env).wait()
    assert done.returncode == 1 and "ended" not in done.stdout
    assert "UsageError: a worker imports the program's main module, which" in done.stderr
    assert 'put that call below `if __name__ == "__main__":`' in done.stderr


@pytest.mark.trial
def test_the_example_of_the_page(elaunch: Launcher) -> None:
    """Its first block prints what its comment says."""
    page = Path(__file__).parent.parent.parent / "docs" / "from-python.md"
    block = page.read_text().split("```python\n")[1].split("```")[0]
    script = elaunch.directory / "example.py"
    script.write_text(block)
    done = elaunch.start_command([sys.executable, script]).wait()
    assert done.stdout == block.strip().rpartition("# ")[2] + "\n", done.stderr


TO_A_FILE = """
import elaunch, os, sys
def says():
    sys.stdout.reconfigure(encoding="latin-1")
    print("said", sys.stdout.seekable())
elaunch.run(says, start_method="fork")
"""


def test_a_fork_of_a_program_whose_output_goes_to_a_file(elaunch: Launcher) -> None:
    """The program's file has a position, and the worker's pipe has none."""
    output = elaunch.directory / "output"
    shell = f'exec env -u PYTHONUNBUFFERED "$@" >{output}'
    words = ["sh", "-c", shell, "sh", sys.executable, "-c", TO_A_FILE]
    done = elaunch.start_command(words).wait()
    assert (done.returncode, output.read_text()) == (0, "said False\n"), done.stderr


def test_a_function_without_a_file(elaunch: Launcher, tmp_path: Path) -> None:
    """A lambda of a program that no other process can import, as in a notebook."""
    place = tmp_path / "empty"
    place.mkdir()
    done = elaunch.start_command([sys.executable, "-c", NO_FILE], cwd=place).wait()
    assert done.stdout == "{0: 0, 1: 1}\n", done.stderr


STREAMS = """
import asyncio, contextlib, elaunch, io, sys

def says():
    print("printed")
    print("said", file=sys.stderr)

async def call():
    return await asyncio.to_thread(elaunch.run, says, redirects=3, rdzv_id="job")

with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    found = asyncio.run(call())
print(found)
"""


def test_what_a_cell_prints_is_in_the_log(elaunch: Launcher) -> None:
    """Whatever stands for the program's streams, as in a notebook; from a thread of a pool."""
    done = elaunch.start_command([sys.executable, "-c", STREAMS]).wait()
    assert done.stdout == "{0: None}\n", done.stderr
    logs = elaunch.run(["logs", "job"])
    assert (logs.stdout, logs.stderr) == ("[rank 0]: printed\n", "[rank 0]: said\n")


NODE = """
import os, sys, time, elaunch
node, port = sys.argv[1:]

def fails():
    if os.environ["RANK"] == "2":
        raise LookupError("on the other node")
    time.sleep(60)

where = dict(nnodes=2, node_rank=node, master_addr="127.0.0.1", master_port=port, preload="none")
print(elaunch.run(lambda: os.environ["LOCAL_RANK"], nproc=2, start_method="fork", **where))
try:
    elaunch.run(fails, nproc=2, start_method="fork", **where)
except Exception as error:
    rank, failure = error.get_first_failure()
    print(type(error).__name__, rank, failure.exitcode, "on the other node" in str(error))
"""


@pytest.mark.trial
def test_two_programs_are_two_nodes(elaunch: Launcher) -> None:
    """Each gets its own workers' results; a failure is raised in both, the same."""
    port = str(free_port())
    script = elaunch.directory / "node.py"
    script.write_text(NODE)
    nodes = [elaunch.start_command([sys.executable, script, str(n), port]) for n in range(2)]
    ended = [node.wait(120) for node in nodes]
    shown = [done.stdout.splitlines() for done in ended]
    assert "the nodes differ" not in ended[0].stderr + ended[1].stderr
    failed = "ChildFailedError 2 1 True"
    assert shown == [["{0: '0', 1: '1'}", failed], ["{2: '0', 3: '1'}", failed]]


def test_a_signal_in_a_thread_s_job_reaches_it_by_the_terminal(elaunch: Launcher) -> None:
    """The agent is in the program's process group, since nothing could be forwarded to it."""
    running = elaunch.start_command([sys.executable, "-c", THREAD])
    running.wait_for_line("^in$")
    os.killpg(running.pid, signal.SIGINT)
    done = running.wait()
    assert (done.stdout, done.returncode) == ("in\nSignalException SIGINT\n", 0), done.stderr


def test_a_server_that_is_killed_is_named(elaunch: Launcher) -> None:
    """A function that only a fork of the program has cannot be called without one."""
    running = elaunch.start_command([sys.executable, "-c", LOST])
    server = int(running.wait_for_line("^of ([0-9]+) ")[1])
    os.kill(server, signal.SIGKILL)
    done = running.wait()
    assert "ChildFailedError True" in done.stdout, done.stderr


def test_an_agent_that_is_killed_and_an_interrupt_are_raised(elaunch: Launcher) -> None:
    """Neither leaves a process; Ctrl-C is KeyboardInterrupt."""
    killed, interrupted = (elaunch.start_command([sys.executable, "-c", LOST]) for _ in range(2))
    os.kill(int(killed.wait_for_line("^of [0-9]+ ([0-9]+)$")[1]), signal.SIGKILL)
    interrupted.wait_for_line("^of ")
    interrupted.send_signal(signal.SIGINT)
    last = [each.wait().stdout.splitlines()[-1] for each in (killed, interrupted)]
    assert last == [
        "ElaunchError False the agent was killed by SIGKILL; ",
        "KeyboardInterrupt False ",
    ]


def test_a_signal_that_another_thread_gets(elaunch: Launcher, tmp_path: Path) -> None:
    """The main thread waits for the agent, and the kernel does not wake it for such a signal."""
    running = elaunch.start_command([sys.executable, "-c", OTHER_THREAD, str(tmp_path / "in")])
    done = running.wait()
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr


def test_nothing_outlives_a_program_that_is_killed(elaunch: Launcher) -> None:
    """The agent ends the job, and with it the fork of the program that is its server."""
    code = "import elaunch, os, time; elaunch.run(lambda: (os.write(1, b'in\\n'), time.sleep(60)))"
    running = elaunch.start_command([sys.executable, "-c", code])
    running.wait_for_line("^in$")
    running.process.kill()
    assert running.wait().returncode == -9
    wait_until(lambda: not elaunch.leftovers(), 20.0, "the end of agent, server and worker")


def test_a_flag_that_is_none_is_named() -> None:
    """Before anything is started."""
    with pytest.raises(TypeError, match=r"no flag 'max_restart'.*did you mean 'max_restarts'"):
        package.run(print, max_restart=1)
    with pytest.raises(TypeError, match="no flag 'detach'"):
        package.run(print, detach=True)
    with pytest.raises(TypeError, match="no flag 'nprocs'; did you mean 'nproc'"):
        package.run(print, nprocs=2)
    with pytest.raises(TypeError, match=r"'end'; an argument .*: functools.partial\(.*, end=...\)"):
        package.run(print, "x", end="")
