"""What a machine, a user or a neighbour may do to a job at its edges."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.jobs import FORK, SPAWN
from tests.integration.watching import act, agent_lines, wait_for_workers
from tests.launching import Launcher, wait_until, without_waits

pytestmark = pytest.mark.slow

# As PyTorch's DDP tutorial does: rank 0 saves into the directory for temporary files, all load.
TUTORIAL = """
import os, sys, tempfile, time
from pathlib import Path
path = Path(tempfile.gettempdir()) / "model.checkpoint"
go, mine = Path(sys.argv[1]), Path(sys.argv[2])
if os.environ["RANK"] == "0":
    path.write_text(os.environ["ELAUNCH_RUN_ID"])
    mine.touch()
while not go.exists():
    time.sleep(0.01)
print("loaded", path.read_text())
other = mine.with_suffix(".loaded")
if os.environ["RANK"] == "1":
    other.touch()
elif "keep" not in sys.argv:
    while not other.exists():
        time.sleep(0.01)
    path.unlink()
"""


def test_two_runs_of_the_tutorial_do_not_clash(elaunch: Launcher, tmp_path: Path) -> None:
    """Each loads its own weights, and nothing is left."""
    script, go = tmp_path / "tutorial.py", tmp_path / "go"
    script.write_text(TUTORIAL)
    saved = [tmp_path / f"saved-{name}" for name in "AB"]
    runs = [
        elaunch.start(["run", *FORK, "--nproc-per-node=2", f"--run-id={name}", script, go, mine])
        for name, mine in zip("AB", saved, strict=True)
    ]
    wait_until(lambda: all(mine.exists() for mine in saved), what="both have saved")
    go.touch()
    for name, running in zip("AB", runs, strict=True):
        done = running.wait()
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f"loaded {name}"] * 2
        assert "TMPDIR" not in done.stderr


def test_files_left_in_the_private_directory_are_pointed_out(
    elaunch: Launcher, tmp_path: Path
) -> None:
    """They are kept, and ``--tmp shared`` is as torchrun."""
    script = tmp_path / "tutorial.py"
    script.write_text(TUTORIAL)
    (tmp_path / "go").touch()
    words = [script, tmp_path / "go", tmp_path / "mine", "keep"]
    done = elaunch.run(["run", *FORK, "--run-id=K", *words])
    (line,) = (each for each in agent_lines(done.stderr) if "TMPDIR" in each)
    left = Path(line.rpartition(", ")[2])
    assert (left / "model.checkpoint").read_text() == "K"
    (left / "model.checkpoint").unlink()
    left.rmdir()
    shown = ["run", *FORK, "--tmp", "shared", *act(FORK, "show=TMPDIR", nproc=1)[3:]]
    assert "0.0 TMPDIR=None" in elaunch.run(shown).stdout


@pytest.mark.parametrize("limit", [8, pytest.param(13, marks=pytest.mark.trial), 40])
def test_too_few_open_files(elaunch: Launcher, tmp_path: Path, limit: int) -> None:
    """The error comes before anything is opened."""
    script = tmp_path / "s.py"
    script.touch()
    command = [sys.executable, "-m", "elaunch", "run", script]
    done = elaunch.start_command(["prlimit", f"--nofile={limit}:{limit}", *command]).wait()
    expected = f"elaunch needs 70 open files for that, and the hard limit is {limit}; raise it"
    assert done.returncode == 2
    assert expected in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("limits", ["64:", "64:200"])
def test_a_low_limit_on_open_files(elaunch: Launcher, tmp_path: Path, limits: str) -> None:
    """The agent raises its own; workers see what was given; too little is a clear error."""
    script = tmp_path / "limit.py"
    script.write_text(
        "import resource\nprint('soft', resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    command = [sys.executable, "-m", "elaunch", "run", *SPAWN, "--nproc-per-node=32", script]
    done = elaunch.start_command(["prlimit", f"--nofile={limits}", *command]).wait()
    if limits == "64:":
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["soft 64"] * 32
    else:
        assert done.returncode == 2
        assert "elaunch needs 256 open files for that, and the hard limit is 200" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("case", ["port", "health"])
def test_an_error_before_the_first_worker_is_in_the_record(
    elaunch: Launcher, tmp_path: Path, case: str
) -> None:
    """The run is FAILED with its reason, not lost, and who started the launcher has its file."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        flags = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
        env = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
        if case == "health":
            flags = ["--nnodes=1"]
            env["TORCHELASTIC_HEALTH_CHECK_PORT"] = str(port)
        flags.append(f"--rdzv-id={case}")
        done = elaunch.start(act(FORK, "exit=0", nproc=1, flags=flags), env=env).wait()
    record = json.loads(elaunch.run(["status", case, "--json"]).stdout)
    assert done.returncode != 0
    assert (record["state"], record["exit_code"]) == ("FAILED", done.returncode), record["reason"]
    why = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert why.splitlines()[0] in record["reason"]


def test_a_report_that_the_file_system_never_takes(elaunch: Launcher, tmp_path: Path) -> None:
    """The job ends with its code; what is not written is named."""
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, sys\n"
        "run = os.path.dirname(os.environ['ELAUNCH_AGENT_SOCKET'])\n"
        "os.mkfifo(os.path.join(run, '.failure-0.json.new'))\n"
        "sys.exit(3)\n"
    )
    done = elaunch.run(["run", *FORK, "--run-id=pipe", script])
    assert done.returncode == 3
    assert "failure-0.json: the file system does not answer for 2 s; going on" in done.stderr
    assert json.loads(elaunch.run(["status", "pipe", "--json"]).stdout)["state"] == "FAILED"


@pytest.mark.parametrize(
    "first", [True, pytest.param(False, marks=pytest.mark.trial)], ids=["first", "second"]
)
def test_a_server_whose_imports_hang(elaunch: Launcher, tmp_path: Path, first: bool) -> None:
    """As those of torch on a dead network disk; ten minutes are five seconds here."""
    (tmp_path / "slow.py").write_text(
        f"import os, time\nwhile os.path.exists({str(tmp_path / 'block')!r}): time.sleep(0.05)\n"
    )
    script = tmp_path / "main.py"
    script.write_text(
        f"import os, signal, time\nopen({str(tmp_path / 'block')!r}, 'w').close()\n"
        "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(600)\n"
    )
    if first:
        (tmp_path / "block").touch()
    code = (
        "import sys; from msgspec.structs import replace; from elaunch.agent import loop\n"
        "limits_of = loop.limits_of\n"
        "def short(*words, **named):\n"
        "    return replace(limits_of(*words, **named), start_timeout=5.0)\n"
        "loop.limits_of = short; from elaunch.__main__ import main; sys.exit(main())"
    )
    words = ["run", "--max-restarts=3", "--preload=slow", "--run-id=hangs", script]
    done = elaunch.start_command([sys.executable, "-c", code, *words], cwd=tmp_path).wait()
    assert done.returncode == 71, done.stderr
    assert "what it imports" in done.stderr and "hangs" in done.stderr
    assert json.loads(elaunch.run(["status", "hangs", "--json"]).stdout)["state"] == "FAILED"


def test_the_exit_code_stands_once_it_is_known(elaunch: Launcher) -> None:
    """A signal that comes while the command ends does not replace the failed worker's code."""
    for delay in (0.0, 0.005, 0.01, 0.02, 0.03):
        running = elaunch.start(act(FORK, "exit=5", nproc=1))
        running.wait_for_line(r"exited with code 5; --max-restarts is 0", stream="stderr")
        time.sleep(delay)
        running.send_signal(signal.SIGTERM)
        assert running.wait().returncode == 5


def test_the_users_signal_shortens_the_siblings_grace(elaunch: Launcher, tmp_path: Path) -> None:
    """--shutdown-timeout holds there, too, and the status says that no restart follows."""
    flags = [
        "--sibling-grace=300",
        "--shutdown-timeout=0.5",
        "--max-restarts=3",
        "--run-id=hurried",
    ]
    words = ["stubborn", f"meet={tmp_path}", "1:exit=7", "wait"]  # nobody fails before both are
    running = elaunch.start(act(FORK, *words, flags=flags))
    running.wait_for_line(r"stopping the other 1 worker", stream="stderr")
    running.send_signal(signal.SIGTERM)
    done = running.wait()
    assert done.returncode == 7
    assert any("being stopped already; no restart" in line for line in agent_lines(done.stderr))


def test_a_module_beside_the_script_can_be_preloaded(elaunch: Launcher, tmp_path: Path) -> None:
    """As the worker itself would find it; one that is nowhere is an error with the way out."""
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script = tmp_path / "main.py"
    script.write_text("import sys\nprint('beside' in sys.modules, sys.path[0])\n")
    done = elaunch.run(["run", "--preload", "beside", script])
    assert (done.returncode, done.stdout) == (0, f"True {tmp_path}\n"), done.stderr
    (tmp_path / "broken.py").write_text("import nowhere_at_all\n")
    done = elaunch.run(["run", "--preload", "broken", script])
    assert done.returncode == 2
    assert "--preload broken: ModuleNotFoundError: No module named 'nowhere_at_all'" in done.stderr
    assert "--start-method spawn" in done.stderr


@pytest.mark.parametrize("name", ["random", "torch"])
def test_a_module_beside_the_script_hides_another(
    elaunch: Launcher, tmp_path: Path, name: str
) -> None:
    """torch cannot be imported then; installing it anew would not help."""
    script = tmp_path / "job" / "main.py"
    script.parent.mkdir()
    script.write_text("import torch\n")
    hiding = script.with_stem(name)
    hiding.write_text("VALUE = 7\n")
    # By itself: what the tests fork has imported torch and its modules already.
    command = [sys.executable, "-m", "elaunch", "run", "main.py"]
    done = elaunch.start_command(["env", *command], cwd=script.parent).wait()
    assert done.returncode == 2, done.stderr
    (told,) = without_waits(done.stderr).splitlines()
    hidden = "torch" if name == "torch" else "Python's own module of that name"
    assert f"{hiding} hides {hidden}; rename it" in told
    assert "install it" not in told


@pytest.mark.parametrize("module", ["elaunch", "elaunch.torchrun"])
def test_modules_in_the_working_directory_are_not_the_agents(
    elaunch: Launcher, tmp_path: Path, module: str
) -> None:
    """``python -m`` has it first on the path."""
    (tmp_path / "main.py").write_text("print('done')\n")
    for name in ("signal", "socket", "logging"):
        (tmp_path / f"{name}.py").write_text("VALUE = 7\n")
    command = [sys.executable, "-m", module, *(["run"] if module == "elaunch" else [])]
    words = ["--start-method=spawn", "--nproc-per-node=1", "main.py"]
    done = elaunch.start_command(["env", *command, *words], cwd=tmp_path).wait()
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_directory_without_anything_known_is_pointed_out(
    elaunch: Launcher, tmp_path: Path
) -> None:
    """A job that silently starts afresh beside its checkpoints would be the worst of answers."""
    saves = tmp_path / "saves"
    saves.mkdir()
    (saves / "step_10.pt").write_bytes(b"")
    done = elaunch.run(act(FORK, "say=up", nproc=1, flags=[f"--checkpoint-dir={saves}"]))
    assert done.returncode == 0
    assert f"no checkpoint is recognised among 1 entry of {saves}" in done.stderr
    assert "--checkpoint-glob" in done.stderr
    (saves / ".metadata").write_bytes(b"")
    done = elaunch.run(act(FORK, "say=up", nproc=1, flags=[f"--checkpoint-dir={saves}"]))
    assert "dcp.save wrote into it; save each step into a new directory below it" in done.stderr
    assert "--checkpoint-glob" not in done.stderr
    (saves / "step_10.pt").unlink()
    (saves / "run.json").write_text('{"schema": 1, "run_id": "", "given": false, "created": 0}')
    again = elaunch.run(act(FORK, "say=up", nproc=1, flags=[f"--checkpoint-dir={saves}"]))
    assert (again.returncode, "recognised" in again.stderr) == (0, False), again.stderr


@pytest.mark.parametrize("closed", ["<&- 2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_files(elaunch: Launcher, tmp_path: Path, closed: str) -> None:
    """What is printed goes nowhere, and into no pipe that takes a newline for a SIGUSR1."""
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.stderr.write('line\\n'); open('done', 'x').close()")
    run = f"{sys.executable} -m elaunch run --nproc-per-node 1 --start-method spawn {script}"
    done = elaunch.start_command(["sh", "-c", f"exec {run} {closed}"], cwd=tmp_path).wait()
    assert (done.returncode, (tmp_path / "done").exists()) == (0, True)


def test_forked_workers_print_where_standard_files_are_closed(
    elaunch: Launcher, tmp_path: Path
) -> None:
    """Into their own files: those of the server, which they are forks of, are others."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print('out'); print('err', file=sys.stderr)")
    run = f"{sys.executable} -m elaunch run --preload none -r 3 --log-dir {tmp_path} {script}"
    elaunch.start_command(["sh", "-c", f"exec {run} >&- 2>&-"]).wait()
    texts = [path.read_text() for path in sorted(tmp_path.glob("*/*/0/std*.log"))]
    assert texts == ["err\n", "out\n"]


def test_closed_output_and_a_deleted_directory(elaunch: Launcher, tmp_path: Path) -> None:
    """Neither shows a traceback of elaunch."""
    quiet = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m elaunch status >&-"], capture_output=True, text=True
    )
    assert (quiet.returncode, quiet.stderr) == (0, "")
    gone = tmp_path / "gone"
    shell = f"mkdir {gone}; cd {gone}; rmdir {gone}; {sys.executable} -P -m elaunch run x.py"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True)
    assert done.returncode == 2
    assert "the working directory was deleted" in done.stderr


@pytest.mark.executed
def test_workers_start_and_end_while_interrupted_early(elaunch: Launcher) -> None:
    """SIGINT in the first moments ends the command; it is never swallowed by an import."""
    for delay in (0.05, 0.1, 0.15, 0.2):
        running = elaunch.start(act(SPAWN, "say=up", "sleep=5", nproc=1))
        time.sleep(delay)
        running.send_signal(signal.SIGINT)
        done = running.wait()
        # An interpreter that has not begun ends with 1, before any of elaunch.
        early = "Failed to import the site|Could not import runpy module|Fatal Python error: init_"
        before = done.returncode == 1 and re.search(early, done.stderr)
        assert before or done.returncode in (130, -signal.SIGINT), done.stderr
    running = elaunch.start(act(SPAWN, "say=up", "wait", nproc=1))
    wait_for_workers(running, nproc=1)
    running.send_signal(signal.SIGINT)
    assert running.wait().returncode == 130


@pytest.mark.trial
def test_a_preloaded_module_that_computes(elaunch: Launcher, tmp_path: Path) -> None:
    """Its OpenMP threads cannot be forked: the workers are plain processes, in all rounds."""
    computes = "import torch\ntorch.set_num_threads(3)\nprint((torch.ones(10 ** 6) + 1).sum())\n"
    (tmp_path / "computes.py").write_text(computes)
    script = tmp_path / "s.py"
    script.write_text(
        f"import os, sys\nstore = os.environ['TORCHELASTIC_USE_AGENT_STORE']\n{computes}"
        "print(store, 'elaunch.server' in sys.modules)\n"
        "sys.exit(os.environ['ELAUNCH_ROUND'] == '0')\n"
    )
    flags = ["--preload", "torch,computes", "--max-restarts", "1", "--rdzv-id", "r"]
    done = elaunch.run(["run", *flags, script])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tensor(2000000.)\n1 False\n") == 2
    (line,) = (each for each in agent_lines(done.stderr) if "--preload" in each)
    assert "--preload computes: it has started" in line
    assert "the workers are started by --start-method spawn instead" in line
    record = json.loads((elaunch.state / "elaunch" / "runs" / "r" / "state.json").read_text())
    assert record["start_method"] == "spawn"


def test_a_parent_that_ignores_the_end_of_children(elaunch: Launcher, tmp_path: Path) -> None:
    """Agent, server and workers do not: the kernel would take away what they wait for."""
    script = tmp_path / "s.py"
    script.write_text("import signal\nprint(repr(signal.getsignal(signal.SIGCHLD)))\n")
    command = [sys.executable, "-m", "elaunch", "run", *SPAWN, script]
    done = elaunch.start_command(["env", "--ignore-signal=CHLD", *command]).wait()
    assert (done.returncode, done.stdout) == (0, "<Handlers.SIG_DFL: 0>\n"), done.stderr


NO_THREADS = """
import runpy, sys, threading
real, left = threading.Thread.start, int(sys.argv.pop(1))
def start(thread):
    global left
    if left == 0:
        raise RuntimeError("can't start new thread")
    left -= 1
    real(thread)
threading.Thread.start = start
runpy.run_module("elaunch", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("left", [0, pytest.param(2, marks=pytest.mark.trial), 5])
def test_no_room_for_the_agents_threads(elaunch: Launcher, left: int) -> None:
    """One line says what to raise, and nothing is left behind."""
    script = elaunch.directory / "limited.py"
    script.write_text(NO_THREADS)
    (elaunch.directory / "x.py").touch()
    argv = ["env", sys.executable, script, str(left), "run", *SPAWN, "x.py"]
    done = elaunch.start_command(argv).wait()
    assert done.returncode == 70, done.stderr
    assert "no thread can be started on this node: see the limits on processes" in done.stderr
    assert "(elaunch explain E-PROCESS-LIMIT)" in done.stderr
    assert "Traceback" not in done.stderr


OFTEN = """
import runpy
from elaunch.agent import patience
patience.FIRST_S = patience.REPEAT_S = 0.001
runpy.run_module("elaunch", run_name="__main__", alter_sys=True)
"""


def test_what_a_start_waits_for_is_told_no_longer_than_it_does(elaunch: Launcher) -> None:
    """Not while the first round's workers are being started, nor of a directory that none is."""
    script = elaunch.directory / "often.py"
    script.write_text(OFTEN)
    (elaunch.directory / "x.py").touch()
    argv = ["env", sys.executable, script, "run", *FORK, "--nproc-per-node=16", "x.py"]
    done = elaunch.start_command(argv, env={"LOGLEVEL": "INFO"}).wait()
    assert done.returncode == 0, done.stderr
    _, begun, after = done.stderr.partition("round 0: first start")
    assert begun
    assert "still waiting" not in after
    assert "None" not in done.stderr
