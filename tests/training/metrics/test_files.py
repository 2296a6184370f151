"""elaunch.training.metrics.files: shared appends, torn lines, full disks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elaunch.training.metrics.files import (
    ROUNDS,
    ROWS,
    Beginning,
    MetricFiles,
    firsts,
    read_rounds,
)
from elaunch.training.metrics.rows import Encoder
from tests.launching import wait_until

ROOT = Path(__file__).parents[3]


def append(files: MetricFiles, round: int, *rows: tuple[str, int], rank: int = 0) -> None:
    """Append rows of one batch."""
    encoder = Encoder(rank, round)
    lines = "".join(encoder.row(group, step, {}, 1.0).line for group, step in rows)
    files.append(lines.encode(), firsts(rows))


def stored(directory: Path, name: str = ROWS) -> list[tuple[Any, ...]]:
    """Return (round, rank, group, step) of each row."""
    path = directory / name
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [
        tuple(row[key] for key in ("round", "rank", "group", "steps_completed")) for row in rows
    ]


def test_rows_are_for_the_user_only(tmp_path: Path) -> None:
    append(MetricFiles(tmp_path, 0, None), 0, ("training", 1))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.slow
def test_ranks_share_a_file(tmp_path: Path) -> None:
    """Real processes append at once, each row stays whole."""
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.training.metrics.test_files import append, MetricFiles\n"
        "files = MetricFiles(Path(sys.argv[1]), 0, None)\n"
        "for step in range(300):\n"
        "    append(files, 0, *[('training', step)] * 3, rank=int(sys.argv[2]))\n"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path, str(rank)], cwd=ROOT)
        for rank in range(3)
    ]
    assert [rank.wait(60) for rank in ranks] == [0, 0, 0]
    rows = stored(tmp_path)
    for rank in range(3):
        assert [row for row in rows if row[1] == rank] == [
            (0, rank, "training", step) for step in range(300) for _ in range(3)
        ]
    assert read_rounds(tmp_path / ROUNDS) == {0: Beginning(None, {"training": 0})}


def test_half_a_line_is_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    files = MetricFiles(tmp_path, 0, None)
    append(files, 0, ("training", 1))
    with open(tmp_path / ROWS, "ab") as file:
        file.write(b'{"group":"training","x":"' + b"y" * 200_000)
    append(files, 0, ("training", 2))
    assert stored(tmp_path) == [(0, 0, "training", 1), (0, 0, "training", 2)]


def test_a_file_of_half_a_line(tmp_path: Path) -> None:
    (tmp_path / ROWS).write_bytes(b'{"gro')
    append(MetricFiles(tmp_path, 0, None), 0, ("training", 2))
    assert stored(tmp_path) == [(0, 0, "training", 2)]


def test_a_killed_writer_holds_nobody_up(tmp_path: Path) -> None:
    code = (
        "import sys, time; from elaunch.runs.statedir import locked; from pathlib import Path\n"
        "with locked(Path(sys.argv[1], 'metrics.lock')):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.send_signal(signal.SIGKILL)
        append(MetricFiles(tmp_path, 0, None), 0, ("training", 1))
    assert stored(tmp_path) == [(0, 0, "training", 1)]


def test_the_first_report_tells_where_a_round_began(tmp_path: Path) -> None:
    """The slower rank's report may be the first one; nothing that is there is touched."""
    append(MetricFiles(tmp_path, 0, None), 0, *[("training", step) for step in range(10)])
    one, two = MetricFiles(tmp_path, 1, None), MetricFiles(tmp_path, 1, None)
    append(one, 1, ("training", 6), rank=0)
    assert read_rounds(tmp_path / ROUNDS)[1] == Beginning(None, {"training": 6})
    append(two, 1, ("training", 5), rank=1)
    append(one, 1, ("training", 7), rank=0)
    assert read_rounds(tmp_path / ROUNDS)[1] == Beginning(None, {"training": 5})
    assert [row[3] for row in stored(tmp_path)] == [*range(10), 6, 5, 7]


def test_foreign_lines_stay_where_they_are(tmp_path: Path) -> None:
    (tmp_path / ROWS).write_bytes(b"# mine\n")
    append(MetricFiles(tmp_path, 0, None), 0, ("training", 1), ("training", 2))
    append(MetricFiles(tmp_path, 1, 1), 1, ("training", 2))
    assert (tmp_path / ROWS).read_text().splitlines()[0] == "# mine"
    assert (tmp_path / ROWS).read_text().count("\n") == 4


@pytest.mark.slow
def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """A limit of the file's size cuts a write in the middle, as a full disk does."""
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from tests.training.metrics.test_files import append, MetricFiles\n"
        "files = MetricFiles(Path(sys.argv[1]), 0, None)\n"
        "append(files, 0, ('training', 1))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        append(files, 0, *[('training', step) for step in range(2, 50)])\n"
        "    except OSError as error:\n"
        "        print(error.strerror)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
        "append(files, 0, *[('training', step) for step in range(2, 50)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "File too large\nFile too large\n", done.stderr
    assert [row[3] for row in stored(tmp_path)] == list(range(1, 50))


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    files = MetricFiles(tmp_path / "gone", 0, None)
    with pytest.raises(FileNotFoundError):
        append(files, 0, ("training", 1))
    files.sync()
    (tmp_path / "gone").mkdir()
    append(files, 0, ("training", 1))
    assert len(stored(tmp_path / "gone")) == 1


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / ROWS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        append(MetricFiles(tmp_path, 0, None), 0, ("training", 1))


@pytest.mark.trial
@pytest.mark.slow
def test_writers_that_are_killed_at_any_moment(tmp_path: Path) -> None:
    """What is there stays readable, and each round is noted."""
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.training.metrics.test_files import append, MetricFiles\n"
        "number = int(sys.argv[2])\n"
        "files = MetricFiles(Path(sys.argv[1]), number, -1)\n"
        "step = 0\n"
        "while True:\n"
        "    append(files, number, *[('training', step + i) for i in range(500)])\n"
        "    step += 500\n"
    )
    path = tmp_path / ROWS

    def reported(number: int) -> bool:
        return path.exists() and b'"round":%d' % number in path.read_bytes()

    for number in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", code, tmp_path, str(number)], cwd=ROOT
        ) as rank:
            wait_until(lambda number=number: reported(number), 60)
            rank.kill()
    append(MetricFiles(tmp_path, 9, -1), 9, ("training", 0))
    assert stored(tmp_path)[-1] == (9, 0, "training", 0)
    assert {row[0] for row in stored(tmp_path)} == {*range(8), 9}
    assert set(read_rounds(tmp_path / ROUNDS)) == {*range(8), 9}
