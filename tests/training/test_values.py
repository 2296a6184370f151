"""elaunch.training.values: objects as bytes, and back."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy
import pytest
import torch

from elaunch.training import values
from elaunch.training.agreement import Value


def through_bytes(obj: object) -> Any:
    """Return what a rank gets of a small object."""
    return values.unpacked(Value(values.packed(obj, ""), trusted=True), None)


@pytest.mark.parametrize(
    "obj",
    [
        None,
        {"a": [1, (2, 3.5)], "b": {4}, "c": "é" * 70_000},
        os.urandom(300_000),
        [bytearray(b"x" * 300_000), b"y" * 300_000],
        [b"z" * 100] * 5000,
    ],
    ids=["none", "nested", "bytes", "bytearray", "many"],
)
def test_what_pickle_takes_comes_back_equal(obj: object) -> None:
    """Small and large."""
    assert through_bytes(obj) == obj


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(100_000, dtype=numpy.int32),
        numpy.asfortranarray(numpy.random.default_rng(0).random((300, 200))),
        numpy.random.default_rng(0).random((300, 200))[::2, ::3],
        numpy.array([{"an": "object"}, None], dtype=object),
        numpy.zeros((0, 5)),
        numpy.float32(3.0),
        numpy.rec.array([(1, 2.0)] * 1000),
    ],
    ids=["plain", "fortran", "strided", "objects", "empty", "scalar", "record"],
)
def test_arrays_come_back_equal(array: Any) -> None:
    """Of every layout."""
    back = through_bytes(array)
    assert back.dtype == array.dtype and back.shape == array.shape
    assert numpy.array_equal(back, array)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(300, 200),
        torch.rand(300, 200).to(torch.bfloat16),
        torch.rand(300, 200).t(),
        torch.rand(300, 200)[:, ::2],
        torch.rand(5000, dtype=torch.complex64),
        torch.rand(5000, dtype=torch.complex64).conj(),
        torch.rand(5000) > 0.5,
        torch.tensor(3),
        torch.zeros(0, 3),
        torch.rand(5000, requires_grad=True),
        torch.nn.Parameter(torch.rand(5000)),
        torch.eye(100).to_sparse(),
    ],
    ids=(
        "dense bfloat16 transposed strided complex conj bool scalar empty grad parameter sparse"
    ).split(),
)
def test_tensors_come_back_equal(tensor: torch.Tensor) -> None:
    """Whether they go as a buffer or in torch's own way."""
    back = through_bytes({"t": tensor})["t"]
    assert type(back) is type(tensor) and back.dtype == tensor.dtype
    assert back.requires_grad == tensor.requires_grad and back.layout == tensor.layout
    assert torch.equal(back.to_dense(), tensor.to_dense())


def test_what_comes_back_is_writable_and_ones_own() -> None:
    """Each receiver has its own."""
    array, tensor = numpy.ones(50_000), torch.ones(50_000)
    first, second = through_bytes([array, tensor]), through_bytes([array, tensor])
    first[0] += 1
    first[1] += 1
    for one in (array, tensor, *second):
        assert float(one.sum()) == 50_000
    assert float(first[0].sum()) == float(first[1].sum()) == 100_000


def test_a_view_of_a_large_tensor_travels_alone() -> None:
    """Torch's own pickle takes the whole storage along."""
    assert len(values.packed(torch.zeros(1_000_000)[:10], "")) < 2000


def test_two_ways_to_one_object_stay_one() -> None:
    """As pickle has it."""
    tensor, array = torch.ones(5000), numpy.ones(5000)
    back = through_bytes([tensor, tensor, array, array])
    assert back[0] is back[1] and back[2] is back[3]


def test_what_an_object_raises_is_raised() -> None:
    """It is the caller who says to whom."""
    with pytest.raises(TypeError, match=r"_thread\.lock"):
        values.packed([threading.Lock()], "")
