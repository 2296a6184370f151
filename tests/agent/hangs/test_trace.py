"""Where a rank is by torch's records: gloo's as torch writes them, NCCL's as they were on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elaunch.agent.hangs.collectives import RankPlace, find
from elaunch.agent.hangs.trace import place

GROUPS = '["0", 2, 1, []]\n["1", 1, null, [0]]\n'


def entry(number: int, **others: Any) -> dict[str, Any]:
    """Return a collective as torch writes it."""
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "is_p2p": False,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[2, 3], []],
        "input_dtypes": ["Float"],
        "time_created_ns": 4 * 10**9,
        "retired": True,
        "state": "scheduled",
        **others,
    }


def test_where_a_rank_is() -> None:
    """By its newest collectives, in the groups whose ranks are known."""
    entries = [entry(5), entry(6, retired=False, input_sizes=[[8]])]
    status = {"0": {"last_enqueued_collective": "7", "last_completed_collective": "-1"}}
    trace = json.dumps({"entries": entries, "pg_status": status}).encode()
    found = place(1, 2, trace, GROUPS)
    assert found.groups["0"].members == (0, 1)
    assert [(call.number, call.elements, call.waits) for call in found.groups["0"].calls] == [
        *((5, 7, False), (6, 8, True))
    ]
    assert found.groups["0"].calls[0].at == 4.0
    assert (found.waits, found.done) == (True, 7)
    # The record begins at 5: of a group without an entry nothing is known.
    assert (found.groups["1"].members, found.groups["1"].entered) == ((0,), None)
    # A default group of other ranks than the job's: nobody is compared.
    assert place(0, 2, b"{}", GROUPS).groups["0"].members == ()
    # A group of that name was made again, and its collectives may be those of the first.
    again = place(1, 2, json.dumps({"entries": [entry(5, time_created_ns=1)]}).encode(), GROUPS * 2)
    assert again.groups["0"].entered is None


def test_collectives_of_a_group_that_was_not_noted() -> None:
    """The disk was full, it may be: where such a rank waits is unknown."""
    trace = json.dumps({"entries": [entry(1, process_group=["7", "a mesh"])]}).encode()
    with pytest.raises(ValueError, match="process group 7"):
        place(1, 2, trace, GROUPS)


def nccl(case: str) -> dict[int, RankPlace]:
    """Return the places of two ranks by what torch 2.11 recorded of NCCL 2.28 on an H100.

    There is no GPU here. In "hang" rank 1 sleeps after five collectives, and rank 0 has queued ten
    more; in "size" the sixth of rank 1 is of another size. In "batch" both have carried out batches
    of a send and a receive, and coalesced collectives; in "batch waits" rank 0 waits in a batch,
    and rank 1, which was asked later, does not any more.
    """
    lines = (Path(__file__).parent / "nccl.jsonl").read_text().splitlines()
    found = {}
    for line in map(json.loads, lines):
        if line["case"] == case:
            groups, record = f'["0", 2, {line["rank"]}, []]\n', json.dumps(line["record"]).encode()
            found[line["rank"]] = place(line["rank"], 2, b'{"pg_status": {}}', groups, record)
    return found


def test_a_rank_that_does_not_enter_a_collective_of_nccl() -> None:
    """The others have queued it, and more."""
    found = nccl("hang")
    assert [one.is_held for one in found.values()] == [True, False] and found[1].done == 10
    culprit = find(found, found[0].awaited[0].at + 3.0)
    assert culprit is not None and culprit.ranks == (1,)
    assert (
        culprit.sentence
        == "rank 1 has not entered all_reduce #6; rank 0 has been waiting there for 3.0 s"
    )


def test_collectives_of_nccl_with_different_sizes() -> None:
    """NCCL does not find out; both ranks wait for ever."""
    found = nccl("size")
    culprit = find(found, found[0].awaited[0].at + 3.0)
    assert culprit is not None and culprit.kind == "differ"
    assert "all_reduce #6 with 4 of Float, rank 1 has entered all_reduce #6 with 104" in (
        culprit.sentence
    )


def test_a_group_with_collectives_of_both_records() -> None:
    """Each has numbers of its own."""
    ended = json.dumps({"entries": [entry(7)]}).encode()
    waits = json.dumps({"entries": [entry(2, retired=False, profiling_name="nccl:all_reduce")]})
    found = place(1, 2, ended, GROUPS, waits.encode())
    numbers = {name: [one.number for one in group.calls] for name, group in found.groups.items()}
    assert numbers == {"0": [7], "0/device": [2], "1": [], "1/device": []}
    assert [str(call) for call in found.awaited] == ["all_reduce #2"]
    assert [name for name, group in found.groups.items() if group.queued] == [
        "0/device",
        "1/device",
    ]


def test_sends_and_receives_that_nccl_carries_out_as_one() -> None:
    """torch does not see the end of each, and gives the batch the number of the last collective."""
    for rank, found in nccl("batch").items():
        calls = found.groups["0/device"].calls
        assert [str(call) for call in calls] == [
            *("all_reduce #1", "all_reduce #2", "allreduce_coalesced #3")
        ], rank
        assert not found.is_held and calls[-1].elements == 8


def test_a_rank_waits_in_sends_and_receives_of_nccl() -> None:
    """Rank 1 has come to its batch, and has ended it, by when it was asked."""
    found = nccl("batch waits")
    assert [call.name for call in found[0].awaited] == ["send 0->1"] and not found[1].is_held
    for one in found.values():
        assert [str(call) for call in one.groups["0/device"].calls] == ["all_reduce #26"]


def test_a_torch_that_numbers_a_batch_as_a_collective() -> None:
    """On its ranks alone: their collectives have other numbers than those of the others."""
    batch = [
        entry(3),
        entry(4, is_p2p=True, retired=False, profiling_name="nccl:send 1->0"),
        entry(4, profiling_name="nccl:coalesced"),
        entry(5, retired=False),
    ]
    found = place(1, 2, b"{}", GROUPS, json.dumps({"entries": batch}).encode())
    assert (found.groups["0/device"].entered, found.groups["0/device"].calls) == (None, ())
