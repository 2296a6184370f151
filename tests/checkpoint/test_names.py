"""Steps and temporary names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.checkpoint.names import is_temporary, sounds_like_checkpoint, step_in_name


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_120", 120),
        ("step-120", 120),
        ("Step120", 120),
        ("steps_120", 120),
        ("120", 120),
        ("00120", 120),
        ("checkpoint_120", 120),
        ("global_step120", 120),
        ("epoch_3_step_120", 120),
        ("epoch=3-step=120", 120),
        ("step_120_epoch_3", 120),
        ("iter_0000120", 120),
        ("model_v2", 2),
        ("v1.120", 120),
        ("latest", None),
        ("step", None),
        ("stepping_up_7", 7),
        ("step_٣", None),
    ],
)
def test_step_of_a_directory(name: str, step: int | None) -> None:
    assert step_in_name(name, is_file=False) == step


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_120.pt", 120),
        ("step_120.pt2", 120),
        ("ckpt_120.pt2", 120),
        ("ckpt.120", 120),
        ("step_120_rank0.pt", 120),
        ("epoch=3-step=120-loss=0.25.ckpt", 120),
        ("model_7_120.pth", 120),
        ("last.pt", None),
    ],
)
def test_step_of_a_file(name: str, step: int | None) -> None:
    assert step_in_name(name, is_file=True) == step


@given(st.integers(min_value=0), st.sampled_from(["step_{}.pt", "a1-step-{:08d}", "x3_{}.pth"]))
def test_any_number_is_read_back(step: int, template: str) -> None:
    assert step_in_name(template.format(step), is_file=True) == step


@pytest.mark.parametrize(
    "name",
    ".tmp step_5.pt.tmp tmp-checkpoint-5 tmp_5 .step_5 step_5.tmp.pt step_5.pt.tmp.4711".split(),
)
def test_temporary_names(name: str) -> None:
    assert is_temporary(name)


def test_finished_names_are_not_temporary() -> None:
    assert not any(map(is_temporary, ["step_5.pt", "attempt_5", "checkpoint-5", "5"]))


def test_what_people_take_for_a_checkpoint() -> None:
    names = ["step_5", "checkpoint-5", "ckpt5", "120", "logs_2024", "version_0", "run12"]
    assert [sounds_like_checkpoint(name) for name in names] == [True] * 4 + [False] * 3
