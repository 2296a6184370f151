"""elaunch.training.metrics.writer: nothing blocks, nothing is lost, what fails is said."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elaunch.errors import ContextError
from elaunch.runs.statedir import locked
from elaunch.training.launch import alone
from elaunch.training.metrics import writer as module
from elaunch.training.metrics.files import LOCK, ROWS, MetricFiles
from elaunch.training.metrics.rows import Encoder, Row
from elaunch.training.metrics.writer import Writer
from elaunch.training.train import TrainContext
from elaunch.wire.progress import ProgressPage
from tests import warm
from tests.launching import wait_until

ROOT = Path(__file__).parents[3]


def context(directory: Path, round: int, where: bool | Path, step: int | None) -> TrainContext:
    """Return the context of the only rank."""
    placed = alone({})._replace(round=round)
    return TrainContext(placed, ProgressPage(), directory, step, tensorboard=where)


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values by tag, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(directory))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False])
def test_tensorboard_shows_what_was_reported(tmp_path: Path, own: bool) -> None:
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    run.mkdir()
    where = True if own else tmp_path / "board"
    shown = (run / "tensorboard" if own else tmp_path / "board") / "rank-0"
    train = context(run, 0, where, None)
    for step in range(1, 9):
        train.report_training_metrics(step, {"loss": step / 2, "note": "x", "on": True})
    train.report_validation_metrics(8, {"acc": math.nan})
    train.close()
    found = scalars(shown)
    assert found["training/loss"] == [(step, step / 2) for step in range(1, 9)]
    assert found["training/on"][0] == (1, 1.0)
    assert math.isnan(found["validation/acc"][0][1])
    assert set(found) == {"training/loss", "training/on", "validation/acc"}

    train = context(run, 1, where, 5)
    train.report_training_metrics(6, {"loss": 9.0})
    train.close()
    assert scalars(shown)["training/loss"] == [*((s, s / 2) for s in range(1, 6)), (6, 9.0)]


@pytest.mark.slow
def test_a_board_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    train = context(tmp_path, 0, tmp_path / "file", None)
    train.report_training_metrics(1, {"loss": 1.0})
    train.close()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    assert "nothing more is written for TensorBoard to" in caplog.text


@pytest.mark.slow
def test_without_the_package_init_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['tensorboard'] = None\n"
        "from elaunch.errors import ContextError\n"
        "from elaunch.training.metrics.writer import require\n"
        "try:\n"
        "    require()\n"
        "except ContextError as error:\n"
        "    print(error)\n"
    )
    done = warm.run([sys.executable, "-c", code])
    assert "pip install 'elaunch[tensorboard]'" in done.stdout, done.stderr


def test_nothing_of_it_is_loaded_without_being_asked_for() -> None:
    code = (
        "import sys, elaunch.training.train\n"
        "print([name for name in ('torch', 'tensorboard', 'numpy', 'rich', 'psutil')"
        " if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[]\n", done.stderr
    assert importlib.util.find_spec("elaunch.training.metrics.writer") is not None


ENCODER = Encoder(rank=0, round=0)


def put(writer: Writer, *steps: int) -> None:
    """Report one row for each step."""
    for step in steps:
        writer.put(ENCODER.row("training", step, {"loss": 0.5}, time.time()))


def steps(directory: Path) -> list[int]:
    """Return the steps on disk."""
    path = directory / ROWS
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["steps_completed"] for line in lines]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a run directory."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def writer(directory: Path) -> Iterator[Writer]:
    """Return a writer that is closed with the test."""
    made = Writer(MetricFiles(directory, 0, None))
    yield made
    directory.mkdir(exist_ok=True)
    made.close(30)


@pytest.mark.slow
def test_close_writes_all_and_joins_the_thread(writer: Writer, directory: Path) -> None:
    threads = threading.active_count()
    put(writer, *range(10_000))
    began = time.monotonic()
    writer.close(30)
    assert time.monotonic() - began < 25  # of the 30 that it may take
    assert steps(directory) == list(range(10_000))
    assert threading.active_count() == threads
    writer.close(30)
    with pytest.raises(ContextError, match="closed"):
        put(writer, 1)


def test_nothing_reported_leaves_nothing(writer: Writer, directory: Path) -> None:
    threads = threading.active_count()
    writer.flush(30)
    writer.close(30)
    assert list(directory.iterdir()) == []
    assert threading.active_count() == threads


def test_rows_come_to_the_disk_without_being_asked(writer: Writer, directory: Path) -> None:
    put(writer, 1)
    wait_until(lambda: steps(directory) == [1])
    put(writer, 2)
    wait_until(lambda: steps(directory) == [1, 2])


def test_flush_waits_for_what_was_put(writer: Writer, directory: Path) -> None:
    for step in range(20):
        put(writer, step)
        writer.flush(30)
        assert steps(directory)[-1] == step


@pytest.mark.slow
def test_threads_may_report_at_once(writer: Writer, directory: Path) -> None:
    threads = [threading.Thread(target=put, args=(writer, *range(2000))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close(30)
    assert sorted(steps(directory)) == sorted(list(range(2000)) * 4)


def test_a_report_does_not_wait_for_a_disk_that_hangs(writer: Writer, directory: Path) -> None:
    """The lock is held by somebody else: rows wait in the queue, the script does not."""
    with locked(directory / LOCK):
        put(writer, *range(1000))
        assert not writer.flush(0.2)
        assert steps(directory) == []
    assert writer.flush(30)
    assert len(steps(directory)) == 1000


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings so far."""
    return [record.getMessage() for record in caplog.records]


def test_rows_beyond_a_full_queue_are_lost_and_counted(
    writer: Writer,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A disk that hangs holds up nobody who reports; one warning, and the number at the end."""
    monkeypatch.setattr(module, "MOST_ROWS", 100)
    with locked(directory / LOCK):
        put(writer, 0)
        wait_until(lambda: not writer.flush(0.01))  # the thread has that row, or will in a moment
        put(writer, *range(1, 1000))
    writer.close(30)
    kept = steps(directory)  # what the thread had, and a whole queue
    assert kept[:100] == list(range(100)) and 101 <= len(kept) <= 200
    first, last = said(caplog)
    assert "the training goes on, and metrics wait in memory: rows beyond 100 are lost" in first
    assert last.startswith(f"{1000 - len(kept)} rows of metrics are lost: cannot write")


@pytest.mark.slow
def test_what_cannot_be_written_is_said_once_and_counted_by_close(
    writer: Writer,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No report, no flush and no close raises: metrics are no reason for a job to end."""
    monkeypatch.setattr(module, "RETRY_S", 0.3)
    put(writer, 1)
    assert writer.flush(30)
    shutil.rmtree(directory)
    put(writer, 2)
    wait_until(lambda: caplog.records)
    put(writer, 3)
    assert not writer.flush(30)
    writer.close(30)
    writer.close(30)
    why = f"cannot write {directory / ROWS}: No such file or directory"
    first, last = said(caplog)
    assert first.startswith(f"{why}; the training goes on")
    assert last == f"2 rows of metrics are lost: {why}"
    assert not [t for t in threading.enumerate() if t.name == "elaunch-metrics"]


@pytest.mark.slow
def test_a_disk_that_comes_back_loses_nothing(
    writer: Writer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.3)
    directory.rmdir()
    put(writer, 1, 2)
    assert not writer.flush(30)
    put(writer, 3)
    directory.mkdir()
    wait_until(lambda: writer.flush(0.1))
    put(writer, 4)
    writer.close(30)
    assert steps(directory) == [1, 2, 3, 4]


@pytest.mark.slow
def test_close_gives_up_in_time(
    writer: Writer, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever holds the lock for ever holds nobody's exit up."""
    with locked(directory / LOCK):
        put(writer, 1)
        began = time.monotonic()
        writer.close(0.3)
        assert time.monotonic() - began < 10
    assert said(caplog)[-1].startswith("1 row of metrics is lost: cannot write")


def test_a_forked_process_reports_nothing(writer: Writer, directory: Path) -> None:
    put(writer, 1)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            writer.flush(30)
            writer.close(30)
            put(writer, 2)
        except ContextError as error:
            code = 42 if f"was forked from the rank (pid {os.getppid()})" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    writer.close(30)
    assert steps(directory) == [1]


def test_a_signal_handler_may_report(writer: Writer, directory: Path) -> None:
    """It runs in the middle of another report of the same thread."""
    told = 0

    def tell(number: int, frame: object) -> None:
        nonlocal told
        told += 1
        put(writer, 10**6)

    before = signal.signal(signal.SIGALRM, tell)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        until = time.monotonic() + 30
        while told < 50 and time.monotonic() < until:
            put(writer, 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    writer.close(30)
    assert steps(directory).count(10**6) == told >= 50


def test_a_defect_of_the_thread_is_no_silence(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    writer = Writer(MetricFiles(directory, 0, None))
    writer.put(Row("training", 1, 0.0, b"no text", {}))  # type: ignore[arg-type]
    assert not writer.flush(30)
    put(writer, 2)
    writer.close(30)
    assert said(caplog) == [
        "the thread that writes metrics has failed (see its traceback); the training goes on, and "
        "metrics wait in memory: rows beyond 100000 are lost",
        "2 rows of metrics are lost: the thread that writes metrics has failed (see its traceback)",
    ]


def test_a_report_is_cheap(writer: Writer) -> None:
    """Twenty microseconds are asked for; a loaded machine may take ten times as long."""
    put(writer, 0)
    best = 1.0
    for _ in range(20):
        began = time.perf_counter()
        put(writer, *range(500))
        best = min(best, (time.perf_counter() - began) / 500)
    assert best < 200e-6


@pytest.mark.slow
def test_an_exception_in_the_script_loses_no_row(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.training.metrics.test_writer import *\n"
        "writer = Writer(MetricFiles(Path(sys.argv[1]), 0, None))\n"
        "try:\n"
        "    put(writer, *range(100))\n"
        "    raise ValueError\n"
        "finally:\n"
        "    writer.close(30)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True)
    assert done.returncode == 1
    assert steps(tmp_path) == list(range(100))
