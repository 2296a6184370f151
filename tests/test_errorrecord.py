"""The record of an exception is written where the launcher asked for it, or not at all."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elaunch import env, errorrecord
from elaunch.agent.failure import errorfile
from tests import warm


def raised() -> ValueError:
    """Return an exception that has been raised."""
    try:
        raise ValueError("boom é\udcff")
    except ValueError as error:
        return error


def test_the_agent_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also text that is no UTF-8, and outside of any except clause."""
    monkeypatch.setenv(env.ERROR_FILE, str(tmp_path / "error.json"))
    errorrecord.write(raised())
    found = errorfile.read(str(tmp_path / "error.json"))
    assert found and not found.problem
    assert found.message.startswith("ValueError: boom é")
    assert 'raise ValueError("boom' in found.callstack
    whole = json.loads((tmp_path / "error.json").read_text())
    assert whole["message"]["message"] == "ValueError: boom é\udcff"


def test_without_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written."""
    monkeypatch.delenv(env.ERROR_FILE, raising=False)
    monkeypatch.chdir(tmp_path)
    errorrecord.write(raised())
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line in the log names it; the error itself is not replaced by another."""
    monkeypatch.setenv(env.ERROR_FILE, str(tmp_path / "none" / "error.json"))
    with caplog.at_level(logging.WARNING):
        errorrecord.write(raised())
    assert "none/error.json cannot be written: No such file or directory" in caplog.text


TORCHS = "from torch.distributed.elastic.multiprocessing.errors import record"
OURS = "from elaunch import record"
ENDINGS = {
    "returns": "return 5",
    "exit 0": "raise SystemExit(0)",
    "exit None": "raise SystemExit",
    "exit 3": "raise SystemExit(3)",
    "exit text": "raise SystemExit('no')",
    "error": "raise ValueError('boom')",
    "chained": "try: 1 / 0\n    except ZeroDivisionError: raise KeyError('x')",
    "interrupt": "raise KeyboardInterrupt",
    "killed": "import os; os.kill(os.getpid(), 11)",
    "no stderr": "raise ValueError('unheard')",
}
IGNORE = "import warnings; warnings.simplefilter('ignore')\n"
SCRIPT = """
import sys
{imports}
@record
def main(first, *, second):
    "What main does."
    assert (first, second) == (1, 2)
    {ending}
assert (main.__name__, main.__doc__) == ("main", "What main does.")
print("returned", main(1, second=2))
"""


def run(imports: str, name: str, file: Path | None) -> subprocess.CompletedProcess[str]:
    """Run the script with one of the two decorators."""
    before = "sys.stderr.close()\n" if name == "no stderr" else ""
    code = SCRIPT.format(imports=before + imports, ending=ENDINGS[name])
    environ = {k: v for k, v in os.environ.items() if k != "TORCHELASTIC_ERROR_FILE"}
    if file is not None:
        environ["TORCHELASTIC_ERROR_FILE"] = str(file)
    return warm.run([sys.executable, "-c", IGNORE + code], environ)


def shape(value: Any) -> Any:
    """Return keys and types of a record, and the message itself."""
    if isinstance(value, dict):
        return {key: shape(part) for key, part in value.items()}
    return value if value == "ValueError: boom" else type(value).__name__


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDINGS)
def test_ends_and_records_as_torchs(name: str, tmp_path: Path) -> None:
    """The same exit code, output and file, for each way to end."""
    files = [tmp_path / "torch.json", tmp_path / "elaunch.json"]
    theirs, ours = (run(i, name, f) for i, f in zip([TORCHS, OURS], files, strict=True))
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
    assert ("Fatal Python error" in ours.stderr) == ("Fatal Python error" in theirs.stderr)
    assert files[0].exists() == files[1].exists() == (name in ("error", "chained", "no stderr"))
    if files[0].exists():
        records = [json.loads(file.read_text()) for file in files]
        assert shape(records[1]) == shape(records[0])
        assert records[1]["message"]["message"] == records[0]["message"]["message"]
        stacks = [record["message"]["extraInfo"]["py_callstack"] for record in records]
        last = records[0]["message"]["message"]
        assert [stack.splitlines()[-1] for stack in stacks] == [last, last]
        assert stacks[1].count("During handling") == stacks[0].count("During handling")


def test_without_a_launcher_nothing_is_written() -> None:
    """And the error goes on."""
    done = run(OURS, "error", None)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: boom\n")


def test_torch_is_not_imported() -> None:
    """Neither by the import nor by an error."""
    code = (
        "import sys, elaunch\n"
        "@elaunch.record\n"
        "def main(): raise ValueError\n"
        "try: main()\n"
        "except ValueError: print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.slow
def test_a_launcher_passes_the_record_of_its_worker_on(tmp_path: Path) -> None:
    """As torch's does: the worker's exception, with its exit code."""
    script = tmp_path / "launch.py"
    script.write_text(
        "import elaunch\n"
        "from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n"
        "@elaunch.record\n"
        "def worker(): raise ValueError('of the worker')\n"
        "@elaunch.record\n"
        "def main():\n"
        "    config = LaunchConfig(1, 1, 1, run_id='x', rdzv_backend='c10d', max_restarts=0,\n"
        "                          rdzv_endpoint='localhost:0', start_method='spawn')\n"
        "    elastic_launch(config, worker)()\n"
        "if __name__ == '__main__': main()\n"
    )
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    done = warm.run([sys.executable, script], environ)
    assert done.returncode == 1, done.stderr
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ValueError: of the worker"
    assert message["errorCode"] == 1
