"""Signals to the command, and the exit codes that it ends with."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, Signals

import pytest

from tests.integration.jobs import FORK, SPAWN, both_methods
from tests.integration.watching import act, agent_lines, wait_for_workers, wait_until_gone
from tests.launching import Launcher, Running, wait_until

pytestmark = pytest.mark.slow

Method = Sequence[str]


@both_methods
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (SIGTERM, 143),
        (SIGINT, 130),
        *(pytest.param(*row, marks=pytest.mark.trial) for row in ((SIGHUP, 129), (SIGQUIT, 131))),
    ],
)
def test_a_signal_reaches_the_workers_and_ends_the_job(
    elaunch: Launcher, method: Method, number: Signals, code: int
) -> None:
    """Each worker gets the signal itself, may end well, and the code is the signal's."""
    words = [f"leave={number.name}", "say=up", "wait"]
    running = elaunch.start(act(method, *words, flags=["--max-restarts=3"]))
    wait_for_workers(running)
    running.send_signal(number)
    done = running.wait()
    assert done.returncode == code
    for rank in range(2):
        assert f"got {number.name} rank={rank} round=0" in done.stdout
    said = "\n".join(agent_lines(done.stderr))
    assert f"round 0: stopped by {number.name}\nresult: STOPPED after " in said
    assert "Traceback" not in done.stderr


SAVES = """
import os, signal, sys, time

def save(*_):
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    os.write(1, b"saved\\n")
    sys.exit(0)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, save)
os.write(1, b"up\\n")
time.sleep(600)
"""


SAME_REQUEST = [
    [SIGINT] * 4,
    [SIGHUP, SIGTERM, SIGHUP],
    [SIGTERM, SIGINT, SIGQUIT, SIGINT],
]


@pytest.mark.parametrize("numbers", SAME_REQUEST)
def test_the_same_request_more_than_once(
    elaunch: Launcher, tmp_path: Path, numbers: list[Signals]
) -> None:
    """Wrappers forward what the process group has got already: the save goes on."""
    (script := tmp_path / "saves.py").write_text(SAVES)
    running = elaunch.start(["run", "--nproc-per-node=1", *FORK, script, tmp_path / "go"])
    running.wait_for_line("^up$")
    for number in numbers:
        running.send_signal(number)
        time.sleep(0.01)  # or the kernel makes one of them
    (tmp_path / "go").touch()
    done = running.wait()
    assert done.returncode in {128 + number for number in numbers}  # which of two pending is first?
    assert "saved" in done.stdout.splitlines()


@pytest.mark.parametrize(
    "flags",
    [["--forward-signals=SIGHUP"], ["--signals-to-handle=SIGTERM", "--preempt-signals=SIGHUP"]],
)
def test_a_signal_with_a_meaning_of_its_own_is_another_request(
    elaunch: Launcher, tmp_path: Path, flags: list[str]
) -> None:
    """SIGTERM right after it is not dropped, and ends the job."""
    hup = "import signal; signal.signal(signal.SIGHUP, lambda *_: None)\n"
    (script := tmp_path / "saves.py").write_text(hup + SAVES.replace(", signal.SIGHUP", ""))
    (tmp_path / "go").touch()
    running = elaunch.start(["run", "--nproc-per-node=1", *FORK, *flags, script, tmp_path / "go"])
    running.wait_for_line("^up$")
    running.send_signal(SIGHUP)
    time.sleep(0.01)
    running.send_signal(SIGTERM)
    done = running.wait()
    assert done.returncode == 143
    assert "saved" in done.stdout.splitlines()


def test_ctrl_c_after_a_pause_ends_at_once(elaunch: Launcher, tmp_path: Path) -> None:
    """And the reason is shown."""
    (script := tmp_path / "saves.py").write_text(SAVES)
    running = elaunch.start(["run", "--nproc-per-node=1", *FORK, script, tmp_path / "go"])
    running.wait_for_line("^up$")

    def again() -> bool:
        running.send_signal(SIGINT)
        return "SIGINT again: killing at once" in running.output("stderr")

    wait_until(again)
    assert running.wait().returncode == 130


def test_what_a_worker_leaves_is_named(elaunch: Launcher, tmp_path: Path) -> None:
    """Although the job is done: an uploader may have lost what it had to do."""
    (script := tmp_path / "leaves.py").write_text(
        "import subprocess; subprocess.Popen(['sleep', '600'])"
    )
    done = elaunch.run(["run", "--nproc-per-node=1", *FORK, script])
    assert done.returncode == 0
    assert re.search(r"round 0: ended what the workers had left: sleep \(\d+\)", done.stderr)


LEAVES = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(os.write(1, b"told\\n") and 0))
    print("uploading", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    print("uploaded", flush=True)
else:
    os._exit(int(sys.argv[2]))
"""
WAITING = "waiting up to 300 s for what they left"


def leave(
    elaunch: Launcher, place: Path, *words: str, wait: str = "300", flags: Sequence[str] = ()
) -> Running:
    """Start a worker that ends at once and leaves an uploader."""
    (script := place / "leaves.py").write_text(LEAVES)
    most = ["--nproc-per-node=1", "--rdzv-id=leaves", f"--wait-for-children={wait}"]
    return elaunch.start(["run", *most, *FORK, *flags, script, place / "go", *words])


def test_what_a_worker_leaves_is_waited_for(elaunch: Launcher, tmp_path: Path) -> None:
    """It ends by itself, and nothing is ended."""
    running = leave(elaunch, tmp_path, "0")
    running.wait_for_line(WAITING, stream="stderr")
    running.wait_for_line("^uploading$")
    (tmp_path / "go").touch()
    done = running.wait()
    assert done.returncode == 0, done.stderr
    assert "uploaded" in done.stdout and "had left" not in done.stderr


def test_the_wait_for_what_a_worker_leaves_is_over(elaunch: Launcher, tmp_path: Path) -> None:
    """It gets SIGTERM then, as it would without a wait."""
    done = leave(elaunch, tmp_path, "0", wait="0.5").wait()
    assert done.returncode == 0, done.stderr
    assert "told" in done.stdout and "ended what the workers had left: python" in done.stderr


@pytest.mark.parametrize("number", [SIGTERM, SIGUSR1])
def test_a_signal_cuts_the_wait_short(elaunch: Launcher, tmp_path: Path, number: Signals) -> None:
    """The job is done nevertheless."""
    running = leave(elaunch, tmp_path, "0")
    running.wait_for_line(WAITING, stream="stderr")
    running.wait_for_line("^uploading$")
    running.send_signal(number)
    done = running.wait()
    assert done.returncode == 0, done.stderr
    assert "told" in done.stdout and "ended what the workers had left: python" in done.stderr


def test_elaunch_stop_cuts_the_wait_short(elaunch: Launcher, tmp_path: Path) -> None:
    """As a signal does."""
    running = leave(elaunch, tmp_path, "0")
    running.wait_for_line(WAITING, stream="stderr")
    elaunch.run(["stop", "leaves"])
    done = running.wait()
    assert done.returncode == 0 and "told" in done.stdout, done.stderr


def test_what_a_worker_leaves_that_fails(elaunch: Launcher, tmp_path: Path) -> None:
    """Nothing is waited for: the next round has to begin."""
    done = leave(elaunch, tmp_path, "3", flags=["--max-restarts=0"]).wait()
    assert done.returncode == 3
    assert WAITING not in done.stderr and "uploaded" not in done.stdout


def test_workers_that_know_nothing_of_the_signal(elaunch: Launcher) -> None:
    """They die of it; that is not a failure."""
    running = elaunch.start(act(FORK, "say=up", "wait", flags=["--max-restarts=3"]))
    wait_for_workers(running)
    running.send_signal(SIGTERM)
    done = running.wait()
    assert done.returncode == 143
    assert "FAILED" not in done.stderr


def test_nohup_is_honoured(elaunch: Launcher, tmp_path: Path) -> None:
    """SIGHUP stays ignored, in the agent and in the workers."""
    words = act(SPAWN, "say=up", f"until={tmp_path}/go")
    running = elaunch.start_command(["nohup", sys.executable, "-m", "elaunch", *words])
    pids = wait_for_workers(running)
    for pid in (running.pid, *pids):
        status = Path(f"/proc/{pid}/status").read_text()
        ignored = next(line for line in status.splitlines() if line.startswith("SigIgn"))
        assert int(ignored.split()[1], 16) & 1 << (SIGHUP - 1)
    running.send_signal(SIGHUP)
    (tmp_path / "go").touch()
    done = running.wait()
    assert done.returncode == 0
    assert "SIGHUP" not in done.stderr


@both_methods
def test_signals_to_handle(elaunch: Launcher, method: Method) -> None:
    """Another signal ends the job when it is asked for."""
    words = ["leave=SIGUSR1", "say=up", "wait"]
    flags = ["--signals-to-handle=SIGUSR1,SIGTERM"]
    running = elaunch.start(act(method, *words, flags=flags))
    wait_for_workers(running)
    running.send_signal(SIGUSR1)
    done = running.wait()
    assert done.returncode == 128 + SIGUSR1
    assert "got SIGUSR1 rank=1" in done.stdout


@both_methods
def test_forwarded_signals_end_nothing(elaunch: Launcher, method: Method, tmp_path: Path) -> None:
    """The workers get them and the job goes on to its end."""
    words = ["tell=SIGUSR1", "tell=SIGUSR2", "say=up", f"until={tmp_path}/go"]
    flags = ["--forward-signals=SIGUSR1,SIGUSR2"]
    running = elaunch.start(act(method, *words, flags=flags))
    wait_for_workers(running)
    for number in (SIGUSR1, SIGUSR2):
        running.send_signal(number)
        for rank in range(2):
            running.wait_for_line(f"^got {number.name} rank={rank}")
    (tmp_path / "go").touch()
    assert running.wait().returncode == 0


def test_a_worker_that_dies_of_a_forwarded_signal_has_failed(elaunch: Launcher) -> None:
    """It had no handler for it."""
    words = ["0:tell=SIGUSR1", "say=up", "wait"]
    running = elaunch.start(act(FORK, *words, flags=["--forward-signals=SIGUSR1"]))
    wait_for_workers(running)
    running.send_signal(SIGUSR1)
    done = running.wait()
    assert done.returncode == 128 + SIGUSR1
    assert "rank 1 was killed by SIGUSR1; stopping the other 1 worker" in done.stderr


TYPES = """
import os, pty, sys, time
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.executable, [sys.executable, "-m", "elaunch", *sys.argv[1:]])
said = b""
for awaited in (b"up", b"grace 30 s", b"counts as one; press Ctrl-C again to kill"):
    while awaited not in said:
        said += os.read(terminal, 65536)
    if b"counts" in awaited:
        time.sleep(1.0)  # until then it is the same request
    os.write(terminal, b"\\x03")
try:
    while data := os.read(terminal, 65536):
        said += data
except OSError:
    pass
os.write(1, said)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_ctrl_c_twice_at_a_terminal(elaunch: Launcher, tmp_path: Path) -> None:
    """Within a second it counts once, which is said; then the workers are killed."""
    (script := tmp_path / "deaf.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "os.write(1, b'up\\n')\n"
        "time.sleep(600)\n"
    )
    words = ["run", "--nproc-per-node=1", *SPAWN, script]
    done = elaunch.start_command([sys.executable, "-c", TYPES, *words]).wait()
    assert done.returncode == 130, done
    assert "Traceback" not in done.stdout
    assert done.stdout.count("counts as one") == done.stdout.count("killing at once") == 1


MASKS = "grep -E 'SigBlk|SigIgn' /proc/self/status"


@both_methods
def test_what_elaunch_starts_inherits_no_signal_blocked_or_ignored(
    elaunch: Launcher, method: Method, tmp_path: Path
) -> None:
    """Workers' programs and the user's commands have what a shell's have."""
    (script := tmp_path / "masks.py").write_text(
        "import os, subprocess, sys, time\n"
        f"subprocess.run({f'{MASKS} > {tmp_path}/worker'!r}, shell=True, check=True)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
    )
    flags: list[str | Path] = ["--nproc-per-node=1", f"--on-event={MASKS} >> {tmp_path}/event"]
    flags += [f"--notice-command={MASKS} > {tmp_path}/notice; touch {tmp_path}/go; sleep 600"]
    done = elaunch.run(["run", *method, *flags, script, tmp_path / "go"])
    assert done.returncode == 0, done.stderr

    def masks(text: str) -> dict[str, int]:
        return {mask: int(bits, 16) for mask, bits in map(str.split, text.splitlines())}

    plain = masks(elaunch.start_command(["sh", "-c", MASKS]).wait().stdout)
    for name in ("worker", "event", "notice"):
        found = masks((tmp_path / name).read_text())
        more = {
            (mask, number)
            for mask in plain
            for number in signal.valid_signals()  # libc's own are none
            if (found[mask] & ~plain[mask]) >> (number - 1) & 1
        }
        assert not more, name


def holds_back(pid: int, number: int) -> bool:
    """Whether a process has a signal blocked."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = re.findall(r"^SigBlk:\s+([0-9a-f]+)$", status, re.M)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.executed
def test_a_request_to_save_in_the_first_moments(elaunch: Launcher) -> None:
    """It is held back until it can be handled; the job is to be continued, not killed by it."""
    running = elaunch.start(act(SPAWN, "wait"))
    wait_until(lambda: holds_back(running.pid, SIGUSR2), what="the signal is held back")
    assert holds_back(running.pid, SIGUSR1)
    running.send_signal(SIGUSR2)
    done = running.wait()
    assert done.returncode == 75, done.stderr
    assert "SIGUSR2 received: no worker runs; to be continued" in done.stderr


def test_workers_inherit_no_signal_that_is_held_back(elaunch: Launcher) -> None:
    """What the agent blocks is its own."""
    running = elaunch.start(act(FORK, "say=up", "wait"))
    pids = wait_for_workers(running)
    every = signal.valid_signals()
    assert not [n for pid in pids for n in every if holds_back(pid, n)]
    running.send_signal(SIGTERM)
    assert running.wait().returncode == 143


def test_a_request_to_save_while_devices_are_counted(elaunch: Launcher, tmp_path: Path) -> None:
    """No worker runs yet: the job is to be continued."""
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        "open('begun', 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
    )
    script = tmp_path / "main.py"
    script.write_text("")
    flags = ["--rdzv-id=counts", "--nproc-per-node=gpu", "--preload=slow"]
    running = elaunch.start(["run", *flags, script], cwd=tmp_path)
    wait_until(lambda: (tmp_path / "begun").exists(), what="the server imports")
    running.send_signal(SIGUSR1)
    done = running.wait()
    assert done.returncode == 75, done.stderr
    record = json.loads(elaunch.run(["status", "counts", "--json"]).stdout)
    assert (record["state"], record["exit_code"]) == ("PREEMPTED", 75)


@pytest.mark.executed
@both_methods
def test_sigterm_in_the_first_moments(elaunch: Launcher, method: Method) -> None:
    """At any time from the first instruction on: no traceback, no orphan, always 143."""
    for milliseconds in range(0, 301, 20 if method is SPAWN else 60):
        running = elaunch.start(act(method, "wait"))
        time.sleep(milliseconds / 1000)  # the moment is what is tested
        running.send_signal(SIGTERM)
        done = running.wait()
        # Before the interpreter runs any of elaunch it is ended by the signal itself, which a
        # shell calls 143, too.
        assert done.returncode in (143, -SIGTERM), f"after {milliseconds} ms: {done.stderr}"
        assert "Traceback" not in done.stderr, f"after {milliseconds} ms"
    wait_until_gone(elaunch)


@pytest.mark.parametrize(
    ("word", "code", "named"),
    [
        ("exit=3", 3, "exited with code 3"),
        ("exit=255", 255, "exited with code 255"),
        ("exit=256", 0, None),
        ("text=so be it", 1, "so be it"),
        ("kill=SIGSEGV", 139, "was killed by SIGSEGV"),
        ("kill=SIGTERM", 143, "was killed by SIGTERM"),
    ],
)
@both_methods
def test_exit_codes(
    elaunch: Launcher, method: Method, word: str, code: int, named: str | None
) -> None:
    """The first failed worker's, and 128 + n for a signal."""
    done = elaunch.run(act(method, f"1:{word}", "1:exit=0", "sleep=0.2"))
    assert done.returncode == code
    assert (named or "") in done.stderr
    assert ("FAILED" in done.stderr) == (code != 0)


def test_the_first_failure_is_what_counts(elaunch: Launcher, tmp_path: Path) -> None:
    """Those that end differently because they were told to do not."""
    words = [f"meet={tmp_path}", "1:exit=7", "wait"]
    done = elaunch.run(act(FORK, *words, nproc=3))
    assert done.returncode == 7
    (stopped,) = re.findall(r"^Stopped by elaunch: (.*)$", done.stderr, re.M)
    assert stopped == "ranks 0, 2 (SIGTERM)"


@pytest.mark.parametrize("word", ["exit=3", "kill=SIGKILL"])
def test_torchruns_exit_codes(elaunch: Launcher, word: str) -> None:
    """1 for every failure."""
    assert elaunch.run(act(FORK, word, flags=["--exit-codes=torchrun"])).returncode == 1


def test_torchruns_exit_code_after_a_signal(elaunch: Launcher) -> None:
    """1 as well; and 0 stays 0."""
    flags = ["--exit-codes=torchrun"]
    running = elaunch.start(act(FORK, "say=up", "wait", flags=flags))
    wait_for_workers(running)
    running.send_signal(SIGINT)
    assert running.wait().returncode == 1
    assert elaunch.run(act(FORK, "exit=0", flags=flags)).returncode == 0


def test_sigint_that_nobody_asked_to_handle(elaunch: Launcher) -> None:
    """Ctrl-C ends the command all the same, without a traceback of its own."""
    running = elaunch.start(act(FORK, "say=up", "wait", flags=["--signals-to-handle=SIGTERM"]))
    wait_for_workers(running)
    running.send_signal(signal.SIGINT)
    done = running.wait()
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
