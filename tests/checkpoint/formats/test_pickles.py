"""Pickles are read without running anything of them, and damage is an error in words."""

from __future__ import annotations

import collections
import os
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elaunch.checkpoint.formats.pickles import (
    Inert,
    attribute,
    load_inert,
    mapping,
    without_hashing,
)
from elaunch.errors import CheckpointError

DAMAGED = "is not a readable pickle"
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


class Runs:
    """Unpickling an object of this class calls ``function(argument)``."""

    def __init__(self, function: Callable[..., object], argument: object) -> None:
        self.call = (function, (argument,))

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object]]:
        return self.call


class Slotted:
    """An object whose pickled state is a pair."""

    __slots__ = ("left", "right")

    def __init__(self) -> None:
        self.left, self.right = 1, "two"


class Sequence(list[int]):
    """A subclass of list with an attribute."""


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("function", [os.system, eval, os.mkdir])
def test_nothing_of_a_pickle_runs(
    tmp_path: Path, function: Callable[..., object], protocol: int
) -> None:
    proof = tmp_path / "ran"
    argument = {os.system: f"touch {proof}", os.mkdir: str(proof)}.get(
        function, f"__import__('os').mkdir({str(proof)!r})"
    )
    evil = pickle.dumps({"a": Runs(function, argument)}, protocol)
    assert list(mapping(load_inert(evil, "evil")) or {}) == ["a"]
    assert not proof.exists()
    pickle.loads(evil)
    assert proof.exists()


def test_building_on_a_class_does_not_change_it() -> None:
    # GLOBAL os system, EMPTY_DICT, BUILD: a state for the class itself.
    with pytest.raises(CheckpointError, match=DAMAGED):
        load_inert(b"cos\nsystem\n}b.", "evil")
    assert not hasattr(Inert(), "state")


@pytest.mark.parametrize(
    "data", [b"\x82\x01.", b"cos\nsystem\n(S'true'\no.", b"(S'a'\nios\nsystem\n."]
)
def test_other_ways_to_a_callable_are_closed(data: bytes) -> None:
    try:
        assert isinstance(load_inert(data, "evil"), Inert)
    except CheckpointError as error:
        assert DAMAGED in str(error)


@pytest.mark.slow
@given(PLAIN, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_data_comes_out_as_it_was(value: object, protocol: int) -> None:
    assert load_inert(pickle.dumps(value, protocol), "plain") == value


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_objects_of_many_kinds(protocol: int) -> None:
    value = {
        "ordered": collections.OrderedDict(a=1),
        "counter": collections.Counter("aab"),
        "sequence": Sequence([1, 2]),
        "set": {1, 2},
        "path": Path("/x"),
        "slotted": Slotted() if protocol >= 2 else None,
        "class": Slotted,
        "key": {Path("/x"): 1},
        "bytes": bytearray(b"x"),
    }
    loaded = mapping(load_inert(pickle.dumps(value, protocol), "objects"))
    assert loaded is not None
    assert list(loaded) == list(value)
    assert mapping(loaded["ordered"]) == {"a": 1} or protocol < 2
    if protocol >= 2:
        assert attribute(loaded["slotted"], "right") == "two"


def test_attributes_of_what_has_none() -> None:
    assert attribute(Inert(), "x") is None
    assert attribute(3, "x") is None
    assert mapping(3) is None
    assert mapping(Inert()) is None


@pytest.mark.slow
@given(PLAIN, st.integers(0, pickle.HIGHEST_PROTOCOL), st.data())
def test_a_truncated_pickle_is_damaged(value: object, protocol: int, data: st.DataObject) -> None:
    whole = pickle.dumps(value, protocol)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(CheckpointError, match=DAMAGED):
        load_inert(whole[:cut], "torn")


@pytest.mark.slow
@given(st.integers(0, pickle.HIGHEST_PROTOCOL), st.data())
def test_flipped_bytes_never_do_more_than_damage(protocol: int, data: st.DataObject) -> None:
    value = {"torch.float32": [Path("/x"), 1.5, 2**70, "r" * 300], "b": (b"rrrr", {"x": {1, 2}})}
    whole = bytearray(pickle.dumps(value, protocol))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        load_inert(bytes(whole), "flipped")
    except CheckpointError as error:
        assert DAMAGED in str(error)


@pytest.mark.slow
@given(st.binary(max_size=60))
@example(b"")
@example(b"\0" * 60)
@example(b"N" + b"r\xff\xff\xff\x7f" + b".")  # would make the unpickler allocate 32 GiB
@example(b"Np2000000000\n.")
@example(b"p" + b"1" * 5000 + b"\n.")
@example(b"\x8e" + b"\xff" * 7 + b"\x7f.")
def test_noise_is_an_error_or_a_value(noise: bytes) -> None:
    try:
        load_inert(noise, "noise")
    except CheckpointError as error:
        assert DAMAGED in str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "protocol",
    [0, *(pytest.param(each, marks=pytest.mark.trial) for each in (1, 3, 5)), 2, 4],
)
def test_the_first_pass_accepts_large_memos(protocol: int) -> None:
    value = [f"text {number}" for number in range(70_000)]
    whole = pickle.dumps(value, protocol)
    without_hashing(whole, "large")
    without_hashing(pickletools.optimize(whole), "large")
    assert load_inert(whole, "large") == value


def test_the_first_pass_knows_every_operation() -> None:
    arguments = {1: b"\1", 2: b"\1\0", 4: b"\1\0\0\0", 8: b"\0" * 8}
    for opcode in pickletools.opcodes:
        size = opcode.arg.n if opcode.arg else 0
        argument = arguments.get(size, b"\0" * 8)  # no bytes, behind a length of 8 bytes or less
        if opcode.arg is None or size == pickletools.UP_TO_NEWLINE:
            lines = 2 if opcode.arg and opcode.arg.name.endswith("pair") else 1
            argument = b"0\n" * lines if opcode.arg else b""
        elif size < 0:
            argument = argument[: {"1": 1, "4": 4, "8": 8}[opcode.arg.name[-1]]]
        without_hashing(b"NNNN" + opcode.code.encode("latin-1") + argument + b"." * 4, "one")
