"""The names of elaunch's own layout go there and back; the digest is what the shell computes."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.checkpoint import layout
from tests.checkpoint import makers

NUMBERS = st.integers(min_value=0, max_value=10**12)


@given(NUMBERS, NUMBERS)
def test_step_name_there_and_back(step: int, round_: int) -> None:
    assert layout.parse_step_name(layout.step_name(step, round_)) == (step, round_)


@given(NUMBERS, NUMBERS, st.from_regex(r"[0-9A-Za-z_-]+", fullmatch=True))
def test_stage_name_there_and_back(step: int, round_: int, uuid: str) -> None:
    name = layout.stage_name(step, round_, uuid)
    assert layout.parse_stage_name(name) == (step, round_, uuid)
    assert layout.unclaimed(name) == name == layout.unclaimed(layout.claim_name(name))
    assert layout.parse_stage_name(layout.claim_name(name)) is None
    assert layout.parse_step_name(name) is None


@pytest.mark.parametrize(
    "name", ["COMMIT", "metadata.json", "manifest.rank-00003.json", ".rank-00001", ".tmp-elaunch-1"]
)
def test_names_that_only_elaunch_writes(name: str) -> None:
    assert layout.is_reserved(name)
    assert not layout.is_reserved(f"my-{name}")


@given(NUMBERS)
def test_manifest_name_there_and_back(rank: int) -> None:
    assert layout.parse_manifest_name(layout.manifest_name(rank)) == rank


def test_names_are_those_of_the_documents() -> None:
    assert layout.step_name(120, 3) == "step-00000120.r3"
    assert layout.manifest_name(0) == "manifest.rank-00000.json"


@pytest.mark.parametrize(
    "name", ["step-120", "step_120.r3", "step-1.r2.k3j4", "step-x.r1", "step-1.r", "astep-1.r1"]
)
def test_other_names_are_not_ours(name: str) -> None:
    assert layout.parse_step_name(name) is None


@given(st.dictionaries(st.sampled_from("abcdef"), st.binary(max_size=20)))
def test_digest_is_over_the_bytes_in_the_order_of_names(manifests: dict[str, bytes]) -> None:
    joined = b"".join(manifests[name] for name in sorted(manifests))
    assert layout.digest(manifests) == f"sha256:{hashlib.sha256(joined).hexdigest()}"


def test_digest_is_what_the_documented_command_prints(tmp_path: Path) -> None:
    path = makers.own(tmp_path)
    command = "LC_ALL=C; cat manifest.rank-*.json | sha256sum"
    printed = subprocess.run(["sh", "-c", command], cwd=path, capture_output=True, text=True)
    assert f"sha256:{printed.stdout.split()[0]}" in (path / layout.COMMIT).read_text()
