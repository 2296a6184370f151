"""The server that is started before the agent's own parts are imported."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Launcher, clean_environment

WATCHED = """
import json, sys
seen = []

def watch(event, args):
    if event == "os.posix_spawn":
        print(json.dumps({"loaded": "elaunch.agent.main" in sys.modules}), flush=True)

sys.addaudithook(watch)
from elaunch.__main__ import main
sys.exit(main())
"""
BROKEN = """
import os, sys
sys.modules["elaunch.agent.main"] = None  # its import fails
from elaunch import proc
from elaunch.__main__ import main
try:
    main()
except ImportError:
    print(proc.children(os.getpid()), "ELAUNCH_SERVER" in os.environ)
"""
STATE = """
import json, os, resource, signal
print(json.dumps({
    "cwd": os.getcwd(),
    "pwd": os.environ["PWD"],
    "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "quit": signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL,
    "hup": signal.getsignal(signal.SIGHUP) == signal.SIG_IGN,
    "blocked": [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "given": os.environ["GIVEN"],
    "secret": "ELAUNCH_ETCD_PASSWORD" in os.environ,
    "server": "ELAUNCH_SERVER" in os.environ,
    "temp": os.environ["TMPDIR"],
}))
"""


def run(program: str, *words: str, directory: Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a program with the words as arguments."""
    environ = clean_environment(directory)
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=120, check=False, **how
    )


@pytest.mark.slow
def test_the_server_is_started_before_the_agent_is_imported(tmp_path: Path) -> None:
    """Else it stands idle for as long as that takes; and there is one only."""
    done = run(WATCHED, "run", "--no-python", "true", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"loaded": False}]


@pytest.mark.slow
def test_an_agent_that_fails_before_it_takes_the_server_ends_it(tmp_path: Path) -> None:
    """A usage error leaves nothing that runs for even a moment longer."""
    done = run(BROKEN, "run", "--no-python", "true", directory=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[] False\n"), done.stderr


@pytest.mark.slow
@pytest.mark.executed
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_have_what_is_known_later(elaunch: Launcher, method: str, tmp_path: Path) -> None:
    """Directory, limits, signals and variables, as if the agent had started the server itself."""
    (tmp_path / "state.py").write_text(STATE)
    (tmp_path / "there").mkdir()
    flags = ["--start-method", method, "--workdir", str(tmp_path / "there")]
    (tmp_path / "job.yaml").write_text("environment:\n  GIVEN: '7'\n")
    flags += ["--file", str(tmp_path / "job.yaml")]
    flags += ["--preload", "json"] if method == "forkserver" else []
    line = [sys.executable, "-m", "elaunch", "run", *flags, str(tmp_path / "state.py")]
    shell = f"trap '' QUIT HUP; ulimit -Sn 300; exec {shlex.join(line)}"
    environ = clean_environment(tmp_path) | {"ELAUNCH_ETCD_PASSWORD": "hidden"}
    done = subprocess.run(
        ["sh", "-c", shell], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("temp") != environ.get("TMPDIR")
    assert found == {
        "cwd": str(tmp_path / "there"),
        "pwd": str(tmp_path / "there"),
        "files": 300,
        "quit": True,
        "hup": True,
        "blocked": [],
        "given": "7",
        "secret": False,
        "server": False,
    }
