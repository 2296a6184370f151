"""A script sees the same of itself and of its process under torchrun and both start methods.

What differs is in the tables here and, in words, in docs/start-methods.md. A row that no longer
differs fails too.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from elaunch.server import torchfix
from tests.integration.parity.launches import (
    HERE,
    Outcome,
    Start,
    differences,
    launch_alike,
    launch_once,
)
from tests.launching import Launcher

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ELAUNCH = ("spawn", "fork")
TWO = [pytest.param("spawned", "spawn", marks=pytest.mark.trial), ("two", "fork")]
"""The fixtures below with two workers."""

# Item -> what docs/start-methods.md calls it.
DIFFERENT = {
    "spawn": {"process/death signal": "parent-death signal"},
    "fork": {
        "process/death signal": "parent-death signal",
        "process/cmdline": "`/proc/PID/cmdline`",
        "process/environ in /proc": "`/proc/PID/environ`",
        "process/signal masks/SigCgt": "`SIGRTMIN+13`",
        "identity/loaded twice": "`__mp_main__`",
        "interpreter/stack depth": "frame at the bottom of the stack",
        "interpreter/frozen objects": "`gc.get_freeze_count()`",
        "libraries/modules of elaunch": "`sys.modules`",
        "libraries/warning filters": "`warnings.filters`",
        "modules": "`sys.modules`",
    },
}
# They depend on the machine or on how the command was started.
MAY_DIFFER = {
    "libraries/threads now": "threads of OpenBLAS",
    "process/signal handlers/SIGHUP": "`nohup`",
    "process/signal masks/SigIgn": "`nohup`",
}
# Environment: name -> whether its value is each run's own.
OWN_VALUES = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
OWN_VALUES |= {"PARITY_OUT"}
_NAMES = "RUN_ID ROUND RESTART_REASON NODE_ADDRS AGENT_SOCKET RESUME_FROM RESUME_STEP CHANNEL_KEY"
ADDED = {f"ELAUNCH_{name}" for name in _NAMES.split()}
CHANGED = {"TORCHELASTIC_USE_AGENT_STORE": "1"}
NEWER = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}  # torchrun up to 2.8 does not set it

PTY = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
# What a job script, a terminal or a scheduler may hand on.
SETTING = """
umask 077; trap '' HUP; exec 9>&2
printf 'one line\\nand a rest' | env --block-signal=USR1 --ignore-signal=USR2 \
    taskset -c {cpu} nice -n 4 prlimit --nofile=400:500 --core=0 "$@"
"""


def comparable(outcome: Outcome, rank: int) -> dict[str, Any]:
    """Return what a worker observed but for its environment and random states."""
    found = outcome.read(str(rank))
    return {name: value for name, value in found.items() if name not in ("environment", "random")}


def assert_alike(
    outcomes: dict[str, Outcome], rank: int, method: str, may_differ: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Compare one rank with torchrun's; return the differences."""
    found = differences(comparable(outcomes["torchrun"], rank), comparable(outcomes[method], rank))
    unexpected = {
        item: values
        for item, values in found.items()
        if item not in DIFFERENT[method]
        and item not in may_differ
        and not _same_names(item, *values)
    }
    assert unexpected == {}
    return found


def _same_names(item: str, left: Any, right: Any) -> bool:
    return item == "process/environ in /proc" and set(right) - ADDED - NEWER == set(left) - NEWER


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Two workers, the script by a relative path, variables that Python and torch read."""
    return launch_once(tmp_path_factory, "two", _two, ("torchrun", "fork"))


@pytest.fixture(scope="module")
def spawned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The same by the other start method, of which each worker imports torch for itself."""
    return launch_once(tmp_path_factory, "spawned", _two, ("torchrun", "spawn"))


def _two(directory: Path) -> Start:
    (directory / "jobs" / "deep").mkdir(parents=True)
    shutil.copy(HERE / "state.py", directory / "jobs" / "probe.py")
    env = {
        "PYTHONPATH": f"relative{os.pathsep}{directory / 'absolute'}",
        "PYTHONWARNINGS": "ignore::ResourceWarning",
        "PYTHONIOENCODING": "utf-8:replace",
        "LC_ALL": "C.UTF-8",
        "TZ": "Asia/Tokyo",
        "TORCH_LOGS": "+dynamo",
        "LOCAL_RANK": "7",
    }
    words = ["jobs/deep/../probe.py", "--flag", "two words", "", "--", "-u", "ä"]
    shell = 'umask 027; exec 7</dev/null; exec "$@"'
    return Start(words, workers=2, shell=shell, env=env)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """One worker, the script by a symbolic link, everything that a process inherits changed."""
    return launch_once(tmp_path_factory, "one", _one)


def _one(directory: Path) -> Start:
    (directory / "link.py").symlink_to(HERE / "state.py")
    return Start(["./link.py"], shell=SETTING.format(cpu=min(os.sched_getaffinity(0))))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("fixture", "method"), TWO)
def test_two_workers_see_what_torchruns_see(
    request: pytest.FixtureRequest, fixture: str, method: str, rank: int
) -> None:
    """The documented differences are all there, and there is no other."""
    found = assert_alike(request.getfixturevalue(fixture), rank, method)
    assert set(DIFFERENT[method]) - set(found) == set()


@pytest.mark.trial
@pytest.mark.parametrize("method", ELAUNCH)
def test_one_worker_inherits_what_torchruns_inherits(one: dict[str, Outcome], method: str) -> None:
    """Mask, ignored signals, limits, affinity, niceness, umask, piped stdin, descriptors."""
    assert_alike(one, 0, method, frozenset(MAY_DIFFER))
    found = one[method].read("0")
    assert found["streams"]["read"] == ["one line\n", "and a rest"]
    assert found["process"]["signal masks"]["SigBlk"] == f"{1 << 9:x}"
    assert found["process"]["signal handlers"]["SIGUSR2"] == "1"
    assert found["process"]["nice"] == min(os.nice(0) + 4, 19)


@pytest.mark.trial
@pytest.mark.parametrize("method", ELAUNCH)
def test_nohup_keeps_its_promise(one: dict[str, Outcome], method: str) -> None:
    """SIGHUP stays ignored in the workers, too; torchrun hands the default on."""
    handlers = {m: one[m].read("0")["process"]["signal handlers"] for m in ("torchrun", method)}
    assert (handlers["torchrun"]["SIGHUP"], handlers[method]["SIGHUP"]) == ("0", "1")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("fixture", "method"), TWO)
def test_the_environment_is_torchruns(
    request: pytest.FixtureRequest, fixture: str, method: str, rank: int
) -> None:
    """But for the names that elaunch adds, each run's own values, and one documented value."""
    outcomes = request.getfixturevalue(fixture)
    torchruns = outcomes["torchrun"].read(str(rank))["environment"]
    found = outcomes[method].read(str(rank))["environment"]
    assert set(found) - set(torchruns) - NEWER == ADDED
    assert set(torchruns) - set(found) == set()
    changed = {name for name in torchruns if torchruns[name] != found[name]} - OWN_VALUES
    as_old = method == "spawn" and torchfix.need_clients()  # docs/versions.md
    assert {name: found[name] for name in changed} == ({} if as_old else CHANGED)


def test_threads_and_title(two: dict[str, Outcome]) -> None:
    """One thread at the start and after torch and numpy; the command line of the worker."""
    for outcome in two.values():
        found = outcome.read("1")
        assert found["libraries"]["threads first"] == 1
        assert found["libraries"]["threads now"] == 1
        line = found["process"]["cmdline"].replace("\0", " ")
        assert line == f"{sys.executable} -u jobs/deep/../probe.py --flag two words  -- -u ä "


@pytest.mark.trial
def test_no_two_processes_draw_the_same(
    two: dict[str, Outcome], spawned: dict[str, Outcome], one: dict[str, Outcome]
) -> None:
    """Over ranks, launchers and runs; only the hashes of texts are a fork server's own."""
    drawn: dict[str, list[Any]] = {}
    for outcomes, ranks in ((two, 2), (spawned, 2), (one, 1)):
        for outcome in outcomes.values():
            for rank in range(ranks):
                for name, value in outcome.read(str(rank))["random"].items():
                    drawn.setdefault(name, []).append(str(value))
    alike = {name: values for name, values in drawn.items() if len(set(values)) < len(values)}
    assert set(alike) == {"hash"}
    assert len(set(alike["hash"])) == len(alike["hash"]) - 1
    hashes = [two["fork"].read(str(rank))["random"]["hash"] for rank in range(2)]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    ("shell", "expected"),
    [
        (
            f'exec {sys.executable} -c "{PTY}" sh -c \'exec "$@" <&-\' sh "$@"',
            {"stdin": "nothing", "stdout": "terminal"},
        ),
        pytest.param('exec "$@" <&-', {"stdin": "nothing"}, marks=pytest.mark.trial),
        pytest.param(
            f'exec {sys.executable} -c "{PTY}" "$@"',
            {"stdin": "terminal", "stdout": "terminal"},
            marks=pytest.mark.trial,
        ),
        pytest.param(
            'exec "$@" 2>&1 </dev/null',
            {"stdin": "file", "stdout": "file"},
            marks=pytest.mark.trial,
        ),
    ],
    ids=["stdin-closed-on-a-terminal", "stdin-closed", "terminal", "both-in-one"],
)
def test_standard_files(tmp_path: Path, shell: str, expected: dict[str, str]) -> None:
    """Closed, a terminal (also for isatty), or one pipe for both streams."""
    methods = ("torchrun", "spawn", "fork without preload")
    words = [str(HERE / "state.py"), "--light"]
    outcomes = launch_alike(tmp_path, Start(words, shell=shell), methods)
    outcomes["fork"] = outcomes["fork without preload"]
    for method in ELAUNCH:
        assert_alike(outcomes, 0, method)
        streams = outcomes[method].read("0")["streams"]
        for name, kind in expected.items():
            stream = streams[name]
            shown = stream and ("terminal" if stream["isatty"] else "file")
            assert (shown or "nothing") == kind


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        pytest.param(["--start-method", "spawn"], True, marks=pytest.mark.trial),
        ([], False),
        # Not forked from the tests' process, which has torch.
        pytest.param(["--preload", "none"], True, marks=[pytest.mark.trial, pytest.mark.executed]),
    ],
    ids=["spawn", "fork", "fork-without-preload"],
)
def test_variables_that_are_read_when_torch_is_imported(
    elaunch: Launcher, options: list[str], counts: bool
) -> None:
    """A forked worker sets them too late; the documentation names the ways out."""
    script = elaunch.directory / "s.py"
    script.write_text(
        "import logging, os\nos.environ['TORCH_LOGS'] = '+dynamo'\nimport torch\n"
        "print(logging.getLogger('torch._dynamo').isEnabledFor(logging.DEBUG))\n"
    )
    done = elaunch.run(["run", *options, script])
    assert (done.stdout, done.returncode) == (f"{counts}\n", 0)


@pytest.mark.parametrize(
    "options",
    [pytest.param(["--start-method", "spawn"], marks=pytest.mark.trial), []],
    ids=["spawn", "fork"],
)
def test_the_debug_level_that_a_script_sets(elaunch: Launcher, options: list[str]) -> None:
    """A forked worker's torch reads it again when the process group is made."""
    script = elaunch.directory / "s.py"
    script.write_text(
        "import os\nos.environ['TORCH_DISTRIBUTED_DEBUG'] = 'DETAIL'\n"
        "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "print(dist.get_debug_level())\ndist.destroy_process_group()\n"
    )
    done = elaunch.run(["run", *options, script])
    # gloo of torch 2.8 prints a line of its own on stdout.
    assert (done.stdout.splitlines()[-1], done.returncode) == ("DebugLevel.DETAIL", 0)


def test_the_documentation_has_every_difference() -> None:
    """docs/start-methods.md names what the tables here name."""
    text = (ROOT / "docs" / "start-methods.md").read_text()
    rows = {*DIFFERENT["spawn"].values(), *DIFFERENT["fork"].values(), *MAY_DIFFER.values()}
    rows |= {f"`{name}`" for name in ADDED | set(CHANGED)} | {
        "hash of a text",
        "`os.getppid()`",
        "`OMP_NUM_THREADS`",
    }
    assert {row for row in rows if row not in text} == set()
