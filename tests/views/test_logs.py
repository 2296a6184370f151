"""The output of several files is shown in the order in which it came."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elaunch.errors import UsageError
from elaunch.runs.directory import RunDir
from elaunch.runs.logtree import Arrival
from elaunch.runs.record import first_record, new_worker
from elaunch.views import logs
from elaunch.views.logs import Choice, Reader, directories, nodes_of

NOW = 1_800_000_000.0


def written(root: Path, parts: list[tuple[float, int, str, bytes]], first: int = 0) -> None:
    """Write parts (time, local rank, stream, bytes) of round 0 as an agent does."""
    for at, local_rank, stream, data in parts:
        path = root / "attempt_0" / str(local_rank) / f"{stream}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = path.stat().st_size if path.exists() else 0
        with open(root / "attempt_0" / "arrivals", "ab") as arrivals:
            arrivals.write(Arrival(at, first + local_rank, local_rank, stream, size).line())
        with open(path, "ab") as file:
            file.write(data)


def recorded(runs: Path, number: int, nodes: tuple[str, ...] = (), job: str = "j") -> RunDir:
    """Make the directory of a run that has ended, of node ``number`` of those nodes."""
    path = runs / (f"{job}.{number + 1}" if number else job)
    (path / "logs").mkdir(parents=True)
    record = first_record("j", "j", path)
    record |= {"state": "COMPLETED", "log_dir": str(path / "logs")}
    record["workers"] = [new_worker(2 * number, 0), new_worker(2 * number + 1, 1)]
    if nodes:
        rows = [
            {"name": name, "host": f"h{i}", "addr": "", "slots": 2} for i, name in enumerate(nodes)
        ]
        record["agent"]["host"] = f"h{number}"
        record |= {"node_rank": number, "nodes": rows, "node_count": len(nodes)}  # type: ignore[typeddict-item]
    run = RunDir(path)
    run.write_state(record)
    return run


def shown(run: RunDir, environ: dict[str, str], choice: Choice) -> tuple[bytes, bytes]:
    """Return what a reader shows on stdout and stderr."""
    out, err = io.BytesIO(), io.BytesIO()
    Reader(run, nodes_of(run, choice.node, environ), choice).run(False, out, err)
    return out.getvalue(), err.getvalue()


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Return an environment with runs of its own."""
    return {"XDG_STATE_HOME": str(tmp_path)}


def runs_in(home: dict[str, str]) -> Path:
    """Return where its runs are."""
    return Path(home["XDG_STATE_HOME"], "elaunch", "runs")


def test_lines_of_all_nodes_by_time(home: dict[str, str]) -> None:
    """Of the nodes that share a home; not those of an earlier job of the same id."""
    zero = recorded(runs_in(home), 0, ("a-1", "b-1"))
    one = recorded(runs_in(home), 1, ("a-1", "b-1"))
    other = recorded(runs_in(home), 4, ("a-0", "b-0"))
    written(zero.logs, [(NOW, 0, "stdout", b"a\nha"), (NOW + 2, 0, "stdout", b"lf\n")])
    written(one.logs, [(NOW + 1, 1, "stdout", b"b\n"), (NOW + 3, 0, "stdout", b"c")], first=2)
    written(other.logs, [(NOW, 1, "stdout", b"old\n")])
    expected = b"[rank 0]: a\n[rank 3]: b\n[rank 0]: half\n[rank 2]: c\n"
    assert shown(zero, home, Choice()) == (expected, b"")
    assert shown(zero, home, Choice(node="h1")) == (b"[rank 3]: b\n[rank 2]: c\n", b"")
    assert shown(zero, home, Choice(node="0")) == (b"[rank 0]: a\n[rank 0]: half\n", b"")
    assert shown(zero, home, Choice(since=NOW + 2.5)) == (b"[rank 2]: c\n", b"")
    hits = Choice(grep=re.compile(b"[bc]"))
    assert shown(zero, home, hits)[0] == b"[rank 3]: b\n[rank 2]: c\n"
    assert shown(one, home, Choice(frozenset({3})))[0] == b"b\n"
    with pytest.raises(UsageError, match=r"--node h9: run j has logs here of node 0 \(h0\), 1 \(h"):
        nodes_of(zero, "h9", home)
    places = directories(zero, nodes_of(zero, None, home), Choice())
    assert [(rank, number) for rank, number, _ in places] == [(0, 0), (2, 0), (3, 0)]


def test_nodes_whose_logs_are_not_here(home: dict[str, str]) -> None:
    """They are named, where no agent is there that would ask for them."""
    run = recorded(runs_in(home), 1, ("a-1", "b-1"))
    written(run.logs, [(NOW, 0, "stdout", b"a\n")], first=2)
    argv = [sys.executable, "-m", "elaunch", "logs", "j.2"]
    done = subprocess.run(argv, env=os.environ | home, capture_output=True, check=True)
    note = b"the logs of 1 node are not here: 0 (h0)\n"
    assert (done.stdout, done.stderr) == (b"[rank 2]: a\n", note)
    recorded(runs_in(home), 0, ("a-1", "b-1"))
    done = subprocess.run(argv, env=os.environ | home, capture_output=True, check=True)
    assert done.stderr == b""


def test_a_run_directory_that_was_copied(home: dict[str, str], tmp_path: Path) -> None:
    """From another machine, say: its log files are in it, wherever the record has them."""
    run = recorded(runs_in(home), 0)
    written(run.logs, [(NOW, 0, "stdout", b"a\n")])
    copied = RunDir(run.path.rename(tmp_path / "copied"))
    assert shown(copied, home, Choice())[0] == b"[rank 0]: a\n"
    ((_, _, place),) = directories(copied, nodes_of(copied, None, home), Choice())
    assert place == f"{copied.logs}/attempt_0/0"
    shutil.rmtree(copied.logs)
    with pytest.raises(UsageError, match=r"no log files here: /.* is not there; it was on "):
        nodes_of(copied, None, home)


def test_one_rank_is_byte_exact(home: dict[str, str]) -> None:
    """Whatever the bytes are, and however the two streams alternate."""
    run = recorded(runs_in(home), 0)
    out, err = os.urandom(300_000), os.urandom(2_000_000)
    parts = [(NOW + at, 1, "stdout", out[at : at + 7000]) for at in range(0, len(out), 7000)]
    parts += [(NOW + at, 1, "stderr", err[at : at + 90_000]) for at in range(0, len(err), 90_000)]
    written(run.logs, [*sorted(parts), (NOW, 0, "stdout", b"not this\n")])
    assert shown(run, home, Choice(frozenset({1}))) == (out, err)


def test_a_line_without_an_end(home: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is held up to LONGEST, whoever else writes; then so many bytes are a line."""
    monkeypatch.setattr(logs, "LONGEST", 1000)
    run = recorded(runs_in(home), 0)
    parts = [(NOW + at, 0, "stdout", b"x" * 300) for at in range(4)]
    written(run.logs, [*parts, (NOW + 4, 1, "stdout", b"b\n"), (NOW + 5, 0, "stdout", b"y\nz\n")])
    lines = [b"[rank 0]: " + b"x" * 1200, b"[rank 1]: b", b"[rank 0]: y", b"[rank 0]: z", b""]
    assert shown(run, home, Choice())[0].split(b"\n") == lines
    assert shown(run, home, Choice(frozenset({0})))[0] == b"x" * 1200 + b"y\nz\n"


def test_a_file_that_was_cut_is_followed(home: dict[str, str]) -> None:
    """From its new end on."""
    run = recorded(runs_in(home), 0)
    written(run.logs, [(NOW, 0, "stdout", b"a\n" * 1000)])
    out, reader = io.BytesIO(), Reader(run, nodes_of(run, None, home), Choice())
    reader.run(False, out, out)
    file = run.logs / "attempt_0" / "0" / "stdout.log"
    file.write_bytes(b"")
    reader.run(False, out, out)
    file.write_bytes(b"new\n")
    reader.run(False, out, out)
    assert out.getvalue() == b"[rank 0]: a\n" * 1000 + b"[rank 0]: new\n"


def test_files_without_arrivals_have_the_time_of_their_change(home: dict[str, str]) -> None:
    """As an agent that notes none leaves them; torn lines of the arrivals are left out."""
    run = recorded(runs_in(home), 0)
    for local_rank, changed in ((0, NOW + 9), (1, NOW)):
        path = run.logs / "attempt_0" / str(local_rank) / "stdout.log"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"line\n")
        os.utime(path, (changed, changed))
    (run.logs / "attempt_0" / "arrivals").write_bytes(
        b"\n[elaunch: 4 bytes are missing]\n1.0 0 0 stdout %s\n9.0 0" % (b"9" * 5000)
    )
    assert shown(run, home, Choice())[0] == b"[rank 1]: line\n[rank 0]: line\n"
    assert shown(run, home, Choice(since=NOW + 5))[0] == b"[rank 0]: line\n"


def test_the_prefix_of_torch_is_not_shown_beside_ours(home: dict[str, str]) -> None:
    """It is before each line of an exception; that of another rank is the script's own text."""
    run = recorded(runs_in(home), 0)
    path = run.logs / "attempt_0" / "0" / "stdout.log"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"[rank0]: Traceback\n[rank0]:\n[rank1]: x\n")
    assert (
        shown(run, home, Choice())[0] == b"[rank 0]: Traceback\n[rank 0]: \n[rank 0]: [rank1]: x\n"
    )


@pytest.mark.slow
def test_a_million_lines_cost_little(home: dict[str, str]) -> None:
    """Of 8 ranks whose output alternates: CPU seconds, and not one open for each line."""
    run, line = recorded(runs_in(home), 0), b"x" * 30 + b"\n"
    parts = [(NOW + i / 10, i % 8, "stdout", line * 25) for i in range(8000)]
    written(run.logs, parts)
    began = time.process_time()
    out, _ = shown(run, home, Choice())
    assert out.count(b"\n") == 200_000 and time.process_time() - began < 5
    assert json.loads(run.state_file.read_text())["state"] == "COMPLETED"
