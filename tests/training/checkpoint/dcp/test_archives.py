"""Archives are those of torch.save, but for the elements, and torch.load reads them."""

from __future__ import annotations

import io
import tracemalloc
from typing import Any

import pytest
import torch

from elaunch.errors import CheckpointError
from elaunch.training.checkpoint.dcp import archives
from elaunch.training.checkpoint.state import compare, tensors
from elaunch.training.checkpoint.state.flatten import Values, lengths_for
from tests.tables import each


@each("shape", [(), (3,), (0,), (0, 4), (5, 7, 2), (300, 1000)])
@each("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128])
def test_template(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Filled with a tensor's bytes it is what torch.save writes, and its checksum is no matter."""
    tensor = torch.rand(shape).to(dtype)
    form = archives.template(dtype, shape)
    archive = form.prefix + bytes(tensors.memory_of(tensor)) + form.suffix
    assert len(archive) == form.size and form.hole == tensor.numel() * tensor.element_size()
    written = io.BytesIO()
    torch.save(tensor, written)
    assert len(written.getvalue()) == form.size and written.getvalue().startswith(form.prefix)
    loaded = archives.unpack_tensor(archive)
    assert loaded.dtype == dtype and loaded.shape == shape and torch.equal(loaded, tensor)


def test_a_template_takes_no_memory() -> None:
    """Of a tensor of a GiB only the headers are made."""
    tracemalloc.start()
    form = archives.template(torch.float32, (1 << 14, 1 << 14))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert form.hole == 1 << 30 and peak < 1 << 20


def test_types_without_whole_bytes_are_refused() -> None:
    """torch.save cannot write them either."""
    with pytest.raises(CheckpointError, match=r"torch\.uint4"):
        archives.template(torch.uint4, (2,))


def test_a_longer_slot_is_a_comment() -> None:
    """Readers of zips skip it, torch.load too."""
    archive = archives.pack({"a": 1})
    for size in (len(archive), len(archive) + 1, len(archive) + archives.LONGEST_COMMENT):
        longer = archives.padded(archive, size)
        assert len(longer) == size and archives.unpack(longer) == {"a": 1}
    for size in (len(archive) - 1, len(archive) + archives.LONGEST_COMMENT + 1):
        with pytest.raises(ValueError, match="cannot get"):
            archives.padded(archive, size)


def test_slots_stay_where_they_will_do() -> None:
    """One that has become much too long, or too short, is made anew."""
    slots = lengths_for({"a": bytes(100)}, {})
    assert slots == {"a": 128}
    assert lengths_for({"a": bytes(20)}, slots) == slots
    assert lengths_for({"a": bytes(129)}, slots) == {"a": 192}
    assert lengths_for({"a": bytes(20)}, {"a": 1 << 20}) == {"a": 64}


class FlatState:
    """Leaves as they are needed here."""

    def __init__(self, **values: Any) -> None:
        self.leaves = {key: Leaf(value) for key, value in values.items()}


class Leaf:
    """A value."""

    is_tensor = False

    def __init__(self, value: Any) -> None:
        self.value = value


def test_equal_values_are_packed_once() -> None:
    """But 1 is not True, 0.0 not -0.0, and a list may have changed inside."""
    values = Values()
    listed = [1]
    first = values.pack(FlatState(a=1, b=0.0, c=(1, "x"), d=listed))  # type: ignore[arg-type]
    listed.append(2)
    second = values.pack(FlatState(a=True, b=-0.0, c=(1, "x"), d=listed))  # type: ignore[arg-type]
    assert second["c"] is first["c"]
    assert [archives.unpack(second[key]) for key in "acd"] == [True, (1, "x"), [1, 2]]
    assert str(archives.unpack(second["b"])) == "-0.0" and second["a"] != first["a"]


def test_samples_see_type_shape_and_elements() -> None:
    """Large ones by some elements; strides do not matter."""
    base = torch.arange(100_000.0).view(250, 400)
    same = {"x": base, "y": base.t().contiguous().t(), "z": base.clone()}
    assert len(set(compare.sampled(same).values())) == 1
    changed = base.clone()
    changed[-1, -1] += 1
    others = {"a": changed, "b": base.view(400, 250), "c": base.to(torch.int32), "d": base + 1}
    found = compare.sampled({**same, **others})
    assert len(set(found.values())) == 5
    small = {"0": torch.tensor(1.0), "1": torch.tensor([1.0]), "e": torch.empty(0), "f": base[:0]}
    assert len(set(compare.sampled(small).values())) == 4
    fp8 = torch.arange(6000.0).to(torch.float8_e5m2)
    assert compare.sampled({"x": fp8}) == compare.sampled({"x": fp8.clone()})
