"""Metadata and files of several ranks: unions, and conflicts that name everything."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.checkpoint.assemble import merge_files, merge_metadata
from elaunch.errors import SaveError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=8,
)
METADATA = st.dictionaries(st.text(max_size=2), JSON, max_size=4)


@pytest.mark.slow
@given(METADATA)
def test_equal_metadata_stay_what_they_are(metadata: dict[str, Any]) -> None:
    merged = merge_metadata({0: metadata, 1: metadata, 5: metadata})
    assert repr(merged) == repr(metadata)


@pytest.mark.slow
@given(METADATA, METADATA)
def test_own_keys_are_put_together(one: dict[str, Any], other: dict[str, Any]) -> None:
    merged = merge_metadata({0: {"rank_0": one}, 1: {"rank_1": other}})
    assert repr(merged) == repr({"rank_0": one, "rank_1": other})


def test_dicts_are_merged_however_deep() -> None:
    one = {"a": {"b": {"c": 1}, "list": [1, 2]}, "same": math.nan}
    other = {"a": {"b": {"d": 2}, "list": [1, 2]}, "same": math.nan}
    merged = merge_metadata({1: other, 0: one})
    assert repr(merged) == "{'a': {'b': {'c': 1, 'd': 2}, 'list': [1, 2]}, 'same': nan}"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ((1, 2), "k is 1 (rank 0), 2 (rank 1)"),
        ((1, 2, 1), "k is 1 (ranks 0, 2), 2 (rank 1)"),
        ((1, True), "k is 1 (rank 0), true (rank 1)"),
        (([1], [1, 2]), "k is [1] (rank 0), [1, 2] (rank 1)"),
        (({"a": 1}, 1), 'k is {"a": 1} (rank 0), 1 (rank 1)'),
        ((None, 0), "k is null (rank 0), 0 (rank 1)"),
        (({"a": {"b": "x"}}, {"a": {"b": "y"}}), 'k.a.b is "x" (rank 0), "y" (rank 1)'),
        (("x" * 200, "y"), 'k is "' + "x" * 78 + '… (rank 0), "y" (rank 1)'),
        ((0,) * 20 + (1,), "k is 0 (ranks 0-19), 1 (rank 20)"),
    ],
)
def test_conflicts(values: tuple[object, ...], told: str) -> None:
    with pytest.raises(SaveError) as raised:
        merge_metadata({rank: {"k": value} for rank, value in enumerate(values)})
    assert str(raised.value).endswith(f"contradict each other: {told}")


def test_all_conflicts_are_told_up_to_a_number() -> None:
    with pytest.raises(SaveError, match=r"k0 is .*k9 is .*; and 2 more$"):
        merge_metadata({rank: {f"k{i}": rank for i in range(12)} for rank in range(2)})


def test_the_lowest_rank_keeps_a_file() -> None:
    parts = {2: {"a": (1, "x")}, 1: {"a": (1, "x"), "b": (2, "y")}, 0: {"c": (0, "z")}}
    assert merge_files(parts) == {"a": 1, "b": 1, "c": 0}


def test_files_of_equal_size_and_different_content() -> None:
    with pytest.raises(SaveError, match=r"a: different content: 1 bytes \(ranks 0, 2\), 1 bytes"):
        merge_files({0: {"a": (1, "x")}, 1: {"a": (1, "y")}, 2: {"a": (1, "x")}})


def test_a_file_above_files() -> None:
    told = r"a/b is a file of rank 0 and a directory of ranks 1, 2 \(a/b/c/d\)"
    file = (1, "x")
    with pytest.raises(SaveError, match=told):
        merge_files({0: {"a/b": file}, 1: {"a/b/c/d": file}, 2: {"a/b/c/d": file}})
