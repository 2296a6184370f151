"""``elaunch wrap`` as a process: output, files, signals, exit codes, and nothing left behind."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH, Signals

import pytest

from tests.launching import Launcher, Running, wait_until

RANK_2 = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "77",
}
HEAR = """
import signal, sys, time
def hear(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    if "leave" in sys.argv:
        sys.exit(5)
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGWINCH"):
    signal.signal(getattr(signal, name), hear)
print("up", flush=True)
while True:
    time.sleep(600)
"""


def start(
    elaunch: Launcher, words: Sequence[str | Path], *flags: str, env: dict[str, str] | None = None
) -> Running:
    """Start ``elaunch wrap`` as rank 2 of 4."""
    return elaunch.start(["wrap", *flags, "--", *words], env=RANK_2 | (env or {}))


def python(code: str, *words: str) -> list[str]:
    """Return the command for a program."""
    return [sys.executable, "-c", code, *words]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "expected", "said"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(7)", 7, "exited with code 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
    ],
)
def test_exit_codes(elaunch: Launcher, code: str, expected: int, said: str) -> None:
    """The command's own; 128 + n for a signal; a line that names the rank and the host."""
    done = start(elaunch, python(code)).wait()
    assert done.returncode == expected
    lines = re.findall(r"^elaunch: rank 2 on (\S+), pid \d+ \(.*\): (.*)$", done.stderr, re.M)
    assert lines == ([(os.uname().nodename, said)] if said else [])


@pytest.mark.slow
def test_a_command_that_cannot_be_started(elaunch: Launcher, tmp_path: Path) -> None:
    """127 and 126 as in a shell; what was probably meant."""
    script = tmp_path / "train.py"
    script.write_text("")
    done = start(elaunch, ["no-such-command"]).wait()
    assert done.returncode == 127
    assert "cannot execute no-such-command: No such file or directory" in done.stderr
    done = start(elaunch, [script]).wait()
    assert done.returncode == 126
    assert f"did you mean `elaunch wrap -- python {script}`?" in done.stderr


@pytest.mark.slow
def test_lines_have_the_rank(elaunch: Launcher) -> None:
    """Bars, bytes that are no UTF-8, long lines, a last line without an end: all of it."""
    code = r"""
import os
os.write(1, b"one\ntwo \xff\xc3\n" + b"x" * 200_000 + b"\n")
os.write(2, b"\r 10%\r 20%\n")
os.write(1, b"no end")
"""
    running = start(elaunch, python(code))
    assert running.wait().returncode == 0
    lines = running.output_bytes().split(b"\n")
    assert lines[:2] == [b"[default2]:one", b"[default2]:two \xff\xc3"]
    assert lines[2] == b"[default2]:" + b"x" * 200_000
    assert lines[3:] == [b"[default2]:no end"]
    assert running.output_bytes("stderr").count(b"[default2]:") == 2


@pytest.mark.slow
def test_a_line_printed_in_pieces_is_shown_whole(elaunch: Launcher) -> None:
    """Other ranks write to the same place between the pieces."""
    code = "import os\nfor _ in range(50):\n    os.write(1, b'a')\n    os.write(1, b'b\\n')"
    running = start(elaunch, python(code))
    assert running.wait().stdout == "[default2]:ab\n" * 50


@pytest.mark.slow
def test_files_by_rank(elaunch: Launcher, tmp_path: Path) -> None:
    """Exact bytes, all ranks of a job in one directory; -r shows nothing on the console."""
    code = "import os; os.write(1, b'\\xff out'); os.write(2, b'err')"
    running = start(elaunch, python(code), f"--log-dir={tmp_path}", "-r", "1", "--tee=2")
    done = running.wait()
    directory = tmp_path / "mpi-77" / "attempt_0" / "2"
    assert (directory / "stdout.log").read_bytes() == b"\xff out"
    assert (directory / "stderr.log").read_bytes() == b"err"
    assert (done.stdout, done.stderr) == ("", "[default2]:err")


@pytest.mark.slow
def test_an_error_file_is_pointed_out(elaunch: Launcher, tmp_path: Path) -> None:
    """Where @record wrote the traceback."""
    code = "import os; open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{}'); os._exit(3)"
    done = start(elaunch, python(code), f"--log-dir={tmp_path}").wait()
    path = tmp_path / "mpi-77" / "attempt_0" / "2" / "error.json"
    assert done.returncode == 3 and f"its traceback is in {path}" in done.stderr


@pytest.mark.slow
def test_as_written(elaunch: Launcher) -> None:
    """``--tee 0`` adds nothing."""
    assert start(elaunch, python("print('a')"), "--tee", "0").wait().stdout == "a\n"


@pytest.mark.slow
def test_arguments_and_stdin_reach_the_command(elaunch: Launcher) -> None:
    """Flags after the command are its own; stdin is the wrapper's."""
    code = "import sys; print(sys.argv[1:], repr(sys.stdin.read()))"
    line = (
        f"printf hello | {sys.executable} -m elaunch wrap {sys.executable} -c '{code}' --tee -- x"
    )
    done = elaunch.start_command(["sh", "-c", line], env=RANK_2).wait()
    assert done.stdout == "[default2]:['--tee', '--', 'x'] 'hello'\n"


@pytest.mark.slow
def test_signals_are_passed_on(elaunch: Launcher) -> None:
    """Those that mean no end may come as often as they like."""
    running = start(elaunch, python(HEAR))
    running.wait_for_line(r":up$")
    for times, number in itertools.product((1, 2), (SIGUSR1, SIGUSR2, SIGWINCH)):
        got = f"got {number.name}"
        running.send_signal(number)
        wait_until(lambda times=times, got=got: running.output().count(got) == times)
    running.send_signal(SIGKILL)
    assert running.wait().returncode == -9


@pytest.mark.slow
@pytest.mark.parametrize("number", [SIGTERM, SIGINT])
def test_the_command_decides_how_it_ends(elaunch: Launcher, number: Signals) -> None:
    """It may save, and its code is kept."""
    running = start(elaunch, python(HEAR, "leave"))
    running.wait_for_line(r":up$")
    running.send_signal(number)
    done = running.wait()
    assert (done.returncode, f"got {number.name}" in done.stdout) == (5, True)


@pytest.mark.slow
def test_a_signal_without_a_handler_ends_it(elaunch: Launcher) -> None:
    """128 + n."""
    running = start(elaunch, ["sh", "-c", "echo up; exec sleep 600"])
    running.wait_for_line(r":up$")
    running.send_signal(SIGTERM)
    assert running.wait().returncode == 143


@pytest.mark.slow
def test_a_shell_s_program_gets_the_signal_too(elaunch: Launcher, tmp_path: Path) -> None:
    """A command that is not Python is often a shell around what has to save."""
    script = tmp_path / "hear.py"
    script.write_text(HEAR)
    running = start(elaunch, ["sh", "-c", f"{sys.executable} {script} leave; exit $?"])
    running.wait_for_line(r":up$")
    running.send_signal(SIGTERM)
    assert "got SIGTERM" in running.wait().stdout


@pytest.mark.slow
def test_helpers_of_python_are_its_own_to_end(elaunch: Launcher) -> None:
    """DataLoader workers must not die before the script has saved."""
    code = """
import signal, subprocess, sys
helper = subprocess.Popen(["sleep", "600"])
def save(number, frame):
    print("helper", helper.poll(), flush=True)
    helper.kill()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
signal.pause()
"""
    running = start(elaunch, python(code))
    running.wait_for_line(r":up$")
    running.send_signal(SIGTERM)
    assert "helper None" in running.wait().stdout


@pytest.mark.slow
def test_who_does_not_end_is_killed(elaunch: Launcher) -> None:
    """After the shutdown timeout."""
    running = start(elaunch, python(HEAR), "--shutdown-timeout=0.3")
    running.wait_for_line(r":up$")
    running.send_signal(SIGTERM)
    done = running.wait()
    assert done.returncode == 137 and "it has not ended in 0.3 s; killing it" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("other", [SIGHUP, SIGINT])
def test_a_terminal_that_closes_cuts_no_save_short(
    elaunch: Launcher, tmp_path: Path, other: Signals
) -> None:
    """A second request within a second is the first one, and is not passed on."""
    code = """
import os, signal, sys, time
def save(*_):
    print("saving", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
while True:
    time.sleep(600)
"""
    running = start(elaunch, python(code, str(tmp_path / "go")))
    running.wait_for_line(r":up$")
    running.send_signal(SIGTERM)
    running.send_signal(other)  # the kernel may hand it out first
    running.wait_for_line(r":saving$")
    (tmp_path / "go").touch()
    assert running.wait().returncode == 0


@pytest.mark.slow
def test_told_twice_means_now(elaunch: Launcher) -> None:
    """A second signal is no request any more; within a second it is the same one."""
    running = start(elaunch, python(HEAR))
    running.wait_for_line(r":up$")
    running.send_signal(SIGTERM)
    running.wait_for_line(r":got SIGTERM$")

    def tell_again() -> bool:
        running.send_signal(SIGINT)
        return "SIGINT again: killing the command at once" in running.output("stderr")

    wait_until(tell_again)
    assert running.wait().returncode == 137


@pytest.mark.slow
def test_a_signal_to_all_processes_comes_once(elaunch: Launcher) -> None:
    """Slurm signals the wrapper and everything below it."""
    running = start(elaunch, python(HEAR))
    running.wait_for_line(r":up$")
    for pid in sorted(elaunch.leftovers(), reverse=True):  # the wrapper waits 50 ms for the others'
        os.kill(pid, SIGUSR1)
    running.wait_for_line(r":got SIGUSR1$")
    running.send_signal(SIGUSR2)  # passed on after the first, if that had been
    running.wait_for_line(r":got SIGUSR2$")
    assert running.output().count("got SIGUSR1") == 1
    running.send_signal(SIGUSR1)  # to the wrapper alone: the one to all is over
    wait_until(lambda: running.output().count("got SIGUSR1") == 2, what="the next is passed on")
    running.send_signal(SIGKILL)


TREE = """
import os, signal, subprocess, sys, time
if "end" not in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(1, b"daemon\\n")
        time.sleep(600)
    os._exit(0)
os.wait()
os.write(1, b"up\\n")
if "end" not in sys.argv:
    time.sleep(600)
"""


@pytest.mark.slow
def test_nothing_is_left_when_the_wrapper_is_killed(elaunch: Launcher) -> None:
    """Not the command, its children, or a daemon of its own session."""
    running = start(elaunch, python(TREE))
    running.wait_for_line(r":daemon$")
    running.wait_for_line(r":up$")
    assert len(elaunch.leftovers()) >= 5
    os.kill(running.pid, SIGKILL)
    running.wait()
    wait_until(lambda: not elaunch.leftovers(), what="nothing is left")


@pytest.mark.slow
def test_nothing_is_left_when_the_command_ends(elaunch: Launcher) -> None:
    """What it has left running is ended, and told to before."""
    running = start(elaunch, python(TREE, "end"))
    assert running.wait().returncode == 0
    assert not elaunch.leftovers()


LEAVES = """
import os, signal, sys, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(os.write(1, b"told\\n") and 0))
    print("uploading", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    print("uploaded", flush=True)
else:
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [None, SIGTERM])
def test_what_the_command_leaves_is_waited_for(
    elaunch: Launcher, tmp_path: Path, number: Signals | None
) -> None:
    """Until it ends by itself, or a signal comes."""
    running = start(elaunch, python(LEAVES, str(tmp_path / "go")), "--wait-for-children=300")
    running.wait_for_line(r":uploading$")
    if number is None:
        (tmp_path / "go").touch()
    else:
        running.send_signal(number)
    done = running.wait()
    assert done.returncode == 0
    assert ("told" in done.stdout) == ("ended what it had left: python" in done.stderr)
    assert ("uploaded" in done.stdout) == (number is None)


def children(pid: int) -> list[int]:
    """Return the children of a process."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.slow
def test_a_server_that_is_lost(elaunch: Launcher) -> None:
    """An error that says so; nothing is left."""
    running = start(elaunch, python(TREE))
    running.wait_for_line(r":up$")
    # A fork that waits to become a server, and did not, is a child, too, and has none.
    (server,) = (child for child in children(running.pid) if children(child))
    os.kill(server, SIGKILL)
    done = running.wait()
    assert done.returncode == 71 and "the server that started the command was lost" in done.stderr
    assert not elaunch.leftovers()


@pytest.mark.slow
def test_a_launcher_that_is_killed_takes_the_command_with_it(elaunch: Launcher) -> None:
    """mpirun that gets SIGKILL tells nobody."""
    words = [sys.executable, "-m", "elaunch", "wrap", *python(HEAR, "leave")]
    launcher = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    running = elaunch.start_command([sys.executable, "-c", launcher, *words], env=RANK_2)
    running.wait_for_line(r":up$")
    running.send_signal(SIGKILL)
    done = running.wait()
    assert "got SIGTERM" in done.stdout and "the launcher has ended" in done.stderr
    wait_until(lambda: not elaunch.leftovers(), what="nothing is left")


@pytest.mark.slow
def test_closed_standard_files(elaunch: Launcher) -> None:
    """No pipe of the wrapper's becomes the command's stdin."""
    line = f"exec {sys.executable} -m elaunch wrap sh -c 'exit 4' <&- >&- 2>&-"
    assert elaunch.start_command(["sh", "-c", line], env=RANK_2).wait().returncode == 4


@pytest.mark.slow
def test_nohup(elaunch: Launcher) -> None:
    """A SIGHUP that is ignored before stays ignored, in the command too."""
    code = "import signal; print(signal.getsignal(signal.SIGHUP).name, signal.getsignal(10).name)"
    line = f"trap '' HUP; exec {sys.executable} -m elaunch wrap {sys.executable} -c '{code}'"
    done = elaunch.start_command(["sh", "-c", line], env=RANK_2).wait()
    assert done.stdout == "[default2]:SIG_IGN SIG_DFL\n"
    assert signal.SIGUSR1 == 10


OWN_LAUNCHER = """
import os, subprocess, sys, elaunch
if sys.argv[1] == "worker":
    rank = int(sys.argv[2])
elif sys.argv[2] == "wrap":
    python = [sys.executable, sys.argv[0], "worker"]
    wrap = [sys.executable, "-m", "elaunch", "wrap", "--rank-env"]
    ranks = [
        subprocess.Popen([*wrap, str(rank), "--", *python, str(rank)]) for rank in range(2)
    ]
    sys.exit(max(rank.wait() for rank in ranks))
else:
    for rank in range(2):
        if os.fork() == 0:
            break
    else:
        sys.exit(max(os.wait()[1] for _ in range(2)))
mine = {"rank": rank, "local_rank": rank, "cross_rank": 0}
ranks = elaunch.DistributedContext(**mine, size=2, local_size=2, cross_size=1, chief_ip="127.0.0.1")
with elaunch.init(distributed=ranks, announce=False) as ctx:
    print("".join(ctx.distributed.allgather(f"<{rank}>")), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("word", ["", "wrap"])
def test_a_script_that_is_its_own_launcher_needs_no_port(
    elaunch: Launcher, tmp_path: Path, word: str
) -> None:
    """Nothing but the numbers is given; whoever has started all of them is the same process."""
    script = tmp_path / "s.py"
    script.write_text(OWN_LAUNCHER)
    done = elaunch.start_command([sys.executable, script, "launcher", word]).wait(100)
    assert done.returncode == 0, done
    assert done.stdout.count("<0><1>") == 2


@pytest.mark.slow
def test_a_worker_starts_ranks_of_its_own(elaunch: Launcher, tmp_path: Path) -> None:
    """A script that is its own launcher gives bare ranks; files by rank where it asks for them."""
    code = "import os, sys; print('worker', sys.argv[1], 'of', os.environ['WORLD_SIZE'])"
    launcher = f"""
import os, subprocess, sys
wrap = [sys.executable, "-m", "elaunch", "wrap", "--rank-env", "MINE"]
wrap += ["--log-dir", {str(tmp_path)!r}]
for rank in "5", "0":
    worker = [*wrap, "--", sys.executable, "-c", {code!r}, rank]
    subprocess.run(worker, check=True, env=os.environ | {{"MINE": rank}})
"""
    script = tmp_path / "launcher.py"
    script.write_text(launcher)
    running = elaunch.start(["run", "--rdzv-id", "own", "--nproc-per-node", "1", str(script)])
    done = running.wait()
    assert done.returncode == 0, done
    assert re.findall(r"^\[default(\d)\]:worker (\d) of (\d)$", done.stdout, re.M) == [
        ("5", "5", "1"),
        ("0", "0", "1"),
    ]
    kept = tmp_path / "own" / "attempt_0"
    assert (kept / "5" / "stdout.log").read_text() == "worker 5 of 1\n"
    assert (kept / "0" / "stdout.log").read_text() == "worker 0 of 1\n"
