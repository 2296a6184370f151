"""Placeholders in the script's arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.checkpoint.records import Checkpoint
from elaunch.checkpoint.search.placeholder import fill_placeholders, has_placeholder

FOUND = Checkpoint(Path("/ck/step_120"), 120, "dcp")


@pytest.mark.parametrize(
    ("args", "filled", "dropped"),
    [
        ("--resume {checkpoint}", "--resume /ck/step_120", ""),
        ("--resume={checkpoint}", "--resume=/ck/step_120", ""),
        ("ckpt={checkpoint}", "ckpt=/ck/step_120", ""),
        ("--flag ckpt={checkpoint}", "--flag ckpt=/ck/step_120", "--flag"),
        ("--resume {checkpoint}/model.pt", "--resume /ck/step_120/model.pt", ""),
        ("-r {checkpoint} --lr 1", "-r /ck/step_120 --lr 1", "--lr 1"),
        ("--lr=1 {checkpoint}", "--lr=1 /ck/step_120", "--lr=1"),
        ("--lr 1 {checkpoint}", "--lr 1 /ck/step_120", "--lr 1"),
        ("--seed -5 {checkpoint}", "--seed -5 /ck/step_120", "--seed -5"),
        ("-.5 {checkpoint}", "-.5 /ck/step_120", "-.5"),
        ("-- {checkpoint}", "-- /ck/step_120", "--"),
        ("- {checkpoint}", "- /ck/step_120", "-"),
        ("{checkpoint}", "/ck/step_120", ""),
        ("--from {checkpoint} {checkpoint_step}", "--from /ck/step_120 120", ""),
        ("--x --from {checkpoint} -s {checkpoint_step}", "--x --from /ck/step_120 -s 120", "--x"),
        ("--a={checkpoint} {checkpoint_step}", "--a=/ck/step_120 120", ""),
        ("--a-{checkpoint_step} {checkpoint}", "--a-120 /ck/step_120", ""),
        ("a{checkpoint}b{checkpoint_step}c", "a/ck/step_120b120c", ""),
        ("{{checkpoint}}", "{checkpoint}", "{checkpoint}"),
        ("--t {{checkpoint_step}}", "--t {checkpoint_step}", "--t {checkpoint_step}"),
        ("--t {{checkpoint}}{checkpoint}", "--t {checkpoint}/ck/step_120", "--t"),
        ('{"a":{checkpoint}}', '{"a":/ck/step_120}', ""),
        (
            "{lr} {} {0} {check} {{x}} {",
            "{lr} {} {0} {check} {{x}} {",
            "{lr} {} {0} {check} {{x}} {",
        ),
        ("", "", ""),
    ],
)
def test_table(args: str, filled: str, dropped: str) -> None:
    assert fill_placeholders(args.split(), FOUND) == tuple(filled.split())
    assert fill_placeholders(args.split(), None) == tuple(dropped.split())


def test_only_unescaped_placeholders_ask_for_a_checkpoint() -> None:
    assert has_placeholder(["--a", "--r={checkpoint}"])
    assert has_placeholder(["{checkpoint_step}"])
    assert has_placeholder(["{{checkpoint}}{checkpoint}"])
    assert not has_placeholder(["{{checkpoint}}", "checkpoint", "{lr}", "{ checkpoint }"])
    assert not has_placeholder([])


def test_a_path_with_braces_is_put_in_as_it_is() -> None:
    odd = Checkpoint(Path("/ck/{checkpoint}/\\1"), 1, "dcp")
    assert fill_placeholders(["--r={checkpoint}"], odd) == ("--r=/ck/{checkpoint}/\\1",)


ARGUMENTS = st.lists(st.text(alphabet="-=a{}", max_size=6) | st.text(max_size=6))


@given(ARGUMENTS, st.sampled_from([FOUND, None]))
def test_arguments_without_placeholder_are_untouched(
    args: list[str], checkpoint: Checkpoint | None
) -> None:
    assert fill_placeholders(args, checkpoint) == tuple(args)
    assert not has_placeholder(args)


PIECES = st.sampled_from(["-a", "--b", "x", "{checkpoint}", "--c={checkpoint}", "{{checkpoint}}"])


@given(st.lists(PIECES))
def test_without_checkpoint_none_is_asked_for_any_more(args: list[str]) -> None:
    left = fill_placeholders(args, None)
    assert left.count("{checkpoint}") == args.count("{{checkpoint}}")
    assert left.count("x") == args.count("x")
    assert len(fill_placeholders(args, FOUND)) == len(args)
