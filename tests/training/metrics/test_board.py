"""elaunch.training.metrics.board: files that TensorBoard reads."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elaunch.training.launch.placement import alone
from elaunch.training.train import TrainContext
from elaunch.wire.progress import ProgressPage
from tests import warm

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
        "from elaunch.training.metrics.board import require\n"
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
    assert importlib.util.find_spec("elaunch.training.metrics.board") is not None
