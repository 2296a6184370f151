"""``elaunch.info()`` and ``elaunch.latest_checkpoint()``."""

from __future__ import annotations

import json
import re
import string
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import elaunch
from elaunch import launchers
from elaunch.errors import PlacementError
from elaunch.launchers import Numbers
from elaunch.training import launch
from elaunch.training.launch import read
from tests.launching import Launcher

TORCH = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
ELAUNCH = TORCH | {
    "TORCHELASTIC_USE_AGENT_STORE": "1",
    "ELAUNCH_RUN_ID": "job",
    "ELAUNCH_ROUND": "5",
    "ELAUNCH_NODE_ADDRS": "10.0.0.1,10.0.0.2",
    "ELAUNCH_CHANNEL_KEY": "00ff",
}
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "n[07-08]",
}


def open_mpi(
    rank: int, size: int, local_rank: int, local_size: int, nodes: int | None = None
) -> dict[str, str]:
    """Return what mpirun of Open MPI 4.1 sets, as far as it says anything of the place."""
    variables = {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(local_rank),
        "PMIX_NAMESPACE": "2071199745",
        "PMIX_RANK": str(rank),
        "OMPI_MCA_orte_precondition_transports": "8c8fd887a09a9725-6ef0e190a449f6db",
    }
    return variables | ({} if nodes is None else {"OMPI_MCA_orte_num_nodes": str(nodes)})


def six(place: launch.Placement) -> tuple[int, ...]:
    """Return rank, size, and the same of the node and of the nodes."""
    return (
        place.rank,
        place.size,
        place.local_rank,
        place.local_size,
        place.cross_rank,
        place.cross_size,
    )


def test_without_a_launcher_a_process_is_alone() -> None:
    """Rank 0 of 1, and nowhere to meet."""
    place = launch.current({})
    assert (place.launcher, six(place), place.store) == ("alone", (0, 1, 0, 1, 0, 1), None)
    assert not place.hosts_store


def test_torchrun() -> None:
    """The numbers as they are; the store is torchrun's."""
    place = launch.current(TORCH)
    assert (place.launcher, six(place)) == ("torchrun", (3, 4, 1, 2, 1, 2))
    assert (place.store, place.hosts_store) == (("node0", 1234), False)
    assert (place.run_id, place.round, place.addr, place.secret) == ("job", 2, "", None)


@pytest.mark.parametrize("value", ["False", None])
def test_torchrun_without_a_store_of_its_own(value: str | None) -> None:
    """Rank 0 hosts it."""
    environ = TORCH | {"TORCHELASTIC_USE_AGENT_STORE": value or ""}
    assert launch.from_torch(environ).hosts_store


def test_elaunch_run() -> None:
    """Its store is hosted in both start methods; the node knows its own address."""
    place = launch.current(ELAUNCH)
    assert (place.launcher, place.round, place.scope) == ("elaunch", 5, "job/5")
    assert (place.addr, place.secret, place.hosts_store) == ("10.0.0.2", b"\x00\xff", False)


def test_a_round_has_a_scope_of_its_own() -> None:
    """Restarts and resizes never share keys in a store that stays."""
    scopes = {
        launch.current(environ).scope
        for environ in (
            TORCH,
            TORCH | {"TORCHELASTIC_RESTART_COUNT": "3"},
            TORCH | {"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "3"},
            TORCH | {"TORCHELASTIC_RUN_ID": "other"},
        )
    }
    assert len(scopes) == 4


@pytest.mark.parametrize(
    "name",
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR "
    "MASTER_PORT".split(),
)
@pytest.mark.parametrize("without", [None, ""])
def test_the_missing_variable_is_named(name: str, without: str | None) -> None:
    """And who sets it."""
    environ = {key: value for key, value in TORCH.items() if key != name}
    with pytest.raises(PlacementError, match=rf"^{name} is not set: torchrun, `elaunch run`"):
        launch.from_torch(environ if without is None else environ | {name: without})


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "x"), ("RANK", "-1"), ("WORLD_SIZE", "2.0"), ("MASTER_PORT", "70000")],
)
def test_a_wrong_variable_is_named(name: str, value: str) -> None:
    """With its value."""
    with pytest.raises(PlacementError, match=rf"^{name}.*{value}"):
        launch.from_torch(TORCH | {name: value})


def test_unequal_nodes_are_fine() -> None:
    """2 + 1 slots."""
    numbers = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert six(launch.from_torch(TORCH | numbers)) == (2, 3, 0, 1, 1, 2)


@pytest.mark.parametrize(
    ("size", "error_file", "local_rank"),
    [("4", "", 1), ("5", "/x/attempt_0/1/error.json", 1), ("5", "", 0)],
)
def test_a_virtual_local_rank_is_seen_through(size: str, error_file: str, local_rank: int) -> None:
    """All workers of a node have LOCAL_RANK=0; the local collectives need the real one."""
    virtual = {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "1", "WORLD_SIZE": size}
    place = launch.from_torch(TORCH | virtual | {"TORCHELASTIC_ERROR_FILE": error_file})
    assert place.local_rank == local_rank


def test_mpirun_on_one_node() -> None:
    """The port is made of the job's id, the same on all ranks; the key is the job's."""
    first, second = (launch.current(open_mpi(rank, 2, rank, 2)) for rank in range(2))
    assert (first.launcher, six(second)) == ("mpi", (1, 2, 1, 2, 0, 1))
    assert first.store == second.store and first.store is not None
    assert first.store[0] == "127.0.0.1" and 20000 <= first.store[1] < 30000
    assert first.hosts_store and first.scope == second.scope
    assert first.secret == second.secret and first.secret is not None
    other = launch.current(open_mpi(0, 2, 0, 2) | {"PMIX_NAMESPACE": "2071199746"})
    assert other.store != first.store


def test_what_is_given_is_kept() -> None:
    """MASTER_ADDR and MASTER_PORT, also on one node."""
    given = {"MASTER_ADDR": "chief", "MASTER_PORT": "7"}
    assert launch.current(open_mpi(0, 2, 0, 2) | given).store == ("chief", 7)


def test_mpirun_on_several_nodes_needs_an_address() -> None:
    """And says how to give it."""
    with pytest.raises(PlacementError, match=r"MASTER_ADDR.*-x MASTER_ADDR=HOST.*--master-addr"):
        launch.current(open_mpi(2, 4, 0, 2, nodes=2))
    place = launch.current(open_mpi(2, 4, 0, 2, nodes=2) | {"MASTER_ADDR": "a"})
    assert six(place) == (2, 4, 0, 2, 1, 2) and place.store is not None
    assert place.store[0] == "a"


def test_unequal_nodes_under_mpirun() -> None:
    """Two nodes are certain; three are not, and the error says what to give."""
    chief = {"MASTER_ADDR": "a"}
    layout = [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]
    nodes = [launch.current(open_mpi(*four, nodes=2) | chief).cross_rank for four in layout]
    assert nodes == [0, 0, 1]
    unknown = open_mpi(2, 4, 0, 1, nodes=3) | chief
    with pytest.raises(PlacementError, match="set GROUP_RANK and GROUP_WORLD_SIZE"):
        launch.current(unknown)
    given = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3"}
    assert six(launch.current(unknown | given)) == (2, 4, 0, 1, 1, 3)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], bool]:
    """Return how many ranks each node has, and whether the ranks go node by node."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    return sizes, draw(st.booleans())


def place_ranks(sizes: list[int], in_blocks: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yield rank, node, local rank and local size, as mpirun's ``--map-by`` slot or node deals."""
    dealt = (
        [node for node, size in enumerate(sizes) for _ in range(size)]
        if in_blocks
        else [node for turn in range(max(sizes)) for node, size in enumerate(sizes) if turn < size]
    )
    for rank, node in enumerate(dealt):
        yield rank, node, dealt[:rank].count(node), sizes[node]


@pytest.mark.slow
@given(layouts())
def test_no_rank_is_put_on_a_wrong_node_unseen(layout: tuple[list[int], bool]) -> None:
    """Either all ranks find their nodes, or one of them says that it cannot."""
    sizes, in_blocks = layout
    wrong, refused = [], False
    for rank, node, local_rank, local_size in place_ranks(sizes, in_blocks):
        environ = open_mpi(rank, sum(sizes), local_rank, local_size, nodes=len(sizes))
        try:
            place = launch.current(environ | {"MASTER_ADDR": "a"})
        except PlacementError:
            refused = True
            continue
        if (place.cross_rank, place.cross_size) != (node, len(sizes)):
            wrong.append(place)
    assert refused or not wrong
    equal = len(set(sizes)) == 1
    if in_blocks and (equal or len(sizes) < 3):
        assert not refused


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {
                "MV2_COMM_WORLD_RANK": "1",
                "MV2_COMM_WORLD_SIZE": "2",
                "MV2_COMM_WORLD_LOCAL_RANK": "1",
                "MV2_COMM_WORLD_LOCAL_SIZE": "2",
                "MPIRUN_ID": "9",
            },
            (1, 2, 1, 2, 0, 1),
        ),
        (
            {
                "PMI_RANK": "1",
                "PMI_SIZE": "2",
                "MPI_LOCALRANKID": "1",
                "MPI_LOCALNRANKS": "2",
                "MASTER_PORT": "9",
            },
            (1, 2, 1, 2, 0, 1),
        ),
        (
            {
                "HOROVOD_RANK": "2",
                "HOROVOD_SIZE": "3",
                "HOROVOD_LOCAL_RANK": "0",
                "HOROVOD_LOCAL_SIZE": "1",
                "HOROVOD_CROSS_RANK": "1",
                "HOROVOD_CROSS_SIZE": "2",
                "HOROVOD_GLOO_RENDEZVOUS_PORT": "9",
                "MASTER_ADDR": "a",
            },
            (2, 3, 0, 1, 1, 2),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, (0, 1, 0, 1, 0, 1)),
    ],
)
def test_other_mpi_launchers(environ: Mapping[str, str], expected: tuple[int, ...]) -> None:
    """MVAPICH, Hydra, horovodrun, a bare PMI."""
    place = launch.current(environ)
    assert (place.launcher, six(place)) == ("mpi", expected)


def test_what_a_launcher_does_not_say_is_asked_for() -> None:
    """PMIx has a rank and no size."""
    with pytest.raises(PlacementError, match="does not say the size; set WORLD_SIZE"):
        launch.current({"PMIX_RANK": "1"})
    with pytest.raises(PlacementError, match="local_size; set LOCAL_WORLD_SIZE"):
        launch.current({"PMI_RANK": "1", "PMI_SIZE": "2"})


def test_slurm() -> None:
    """Unequal nodes, the first host of the step, a port of the step's id."""
    place = launch.current(SLURM)
    assert (place.launcher, six(place)) == ("slurm", (2, 3, 0, 1, 1, 2))
    assert place.store is not None and place.store[0] == "n07" and place.hosts_store
    assert place.run_id == "slurm-12.3"
    assert launch.current(SLURM | {"SLURM_STEP_ID": "4"}).store != place.store


def test_mpirun_inside_a_slurm_job_is_mpirun() -> None:
    """Slurm's variables are those of mpirun's own step."""
    assert launch.current(SLURM | open_mpi(0, 2, 0, 2)).launcher == "mpi"
    # srun --mpi=pmi2 sets PMI's beside its own.
    assert launch.current(SLURM | {"PMI_RANK": "2", "PMI_SIZE": "3"}).launcher == "slurm"


@pytest.mark.parametrize(
    "change", [{"SLURM_STEP_ID": ""}, {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_PROCID": ""}]
)
def test_outside_of_a_step_with_tasks_a_process_is_alone(change: dict[str, str]) -> None:
    """The batch script itself has SLURM_PROCID=0, and ``salloc``'s shell has SLURM_NTASKS."""
    assert launch.current(SLURM | change).launcher == "alone"


def test_torchs_variables_come_first_and_the_launcher_is_still_named() -> None:
    """``elaunch wrap`` sets them under mpirun; nobody but rank 0 hosts the store then."""
    wrapped = open_mpi(3, 4, 1, 2, nodes=2) | TORCH | {"TORCHELASTIC_USE_AGENT_STORE": ""}
    place = launch.current(wrapped)
    assert (place.launcher, place.hosts_store, place.run_id) == ("mpi", True, "job")
    by_hand = {k: v for k, v in TORCH.items() if not k.startswith("TORCHELASTIC")}
    assert launch.current(by_hand).launcher == "explicit"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", "a"),
        ("n[1-3,07],m2", "n1 n2 n3 n07 m2"),
        ("n[08-11]x", "n08x n09x n10x n11x"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("a-b.c,d", "a-b.c d"),
    ],
)
def test_slurms_lists_of_hosts(text: str, hosts: str) -> None:
    """Ranges with leading zeros, lists, several brackets."""
    assert launchers.hosts_of(text) == hosts.split()


@pytest.mark.parametrize("text", ["n[1-", "n[]", "n[a]", "a,,b", "a,", "n[1-999999999]", "[", " "])
def test_a_list_of_hosts_that_is_none(text: str) -> None:
    """An error, and soon."""
    with pytest.raises(PlacementError, match="the list of hosts"):
        launchers.hosts_of(text)


@given(st.text(string.digits + "n[],-", max_size=30))
def test_any_list_of_hosts_gives_hosts_or_an_error(text: str) -> None:
    """Never another exception."""
    try:
        assert all(launchers.hosts_of(text)) or not text
    except PlacementError as error:
        assert "list of hosts" in str(error)


@pytest.mark.parametrize(
    ("tasks", "sizes"), [("2(x3),1", [2, 2, 2, 1, None]), ("4", [4, None]), ("", [None])]
)
def test_tasks_per_node(tasks: str, sizes: list[int | None]) -> None:
    """Slurm's notation with repetitions."""
    environ = {"SLURM_STEP_TASKS_PER_NODE": tasks}
    assert [launchers.slurm_local_size(environ, i) for i in range(len(sizes))] == sizes


GOOD: dict[str, Any] = dict(zip(Numbers.__annotations__, (3, 4, 1, 2, 1, 2), strict=True))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rank": 4}, "rank is 4, but size is 4"),
        ({"rank": -1}, "rank is -1"),
        ({"rank": "3"}, "rank is '3', which is no whole number"),
        ({"rank": True}, "rank is True"),
        ({"size": 0}, "size is 0"),
        ({"local_rank": 2}, "local_rank is 2, but local_size is 2"),
        ({"cross_rank": 2}, "cross_rank is 2, but cross_size is 2"),
        ({"local_size": 5}, "local_size is 5, more than size"),
        ({"cross_size": 5}, "cross_size is 5, more nodes than ranks"),
        ({"cross_size": 1, "cross_rank": 0}, "all ranks of one node are local"),
        ({"local_size": 4}, "the ranks of the other nodes are missing"),
        ({"local_size": 3, "cross_size": 3}, "that is at least 5 ranks"),
        ({"rank": 2}, "rank is 2, but cross_rank 1 × local_size 2 . local_rank 1 is 3"),
    ],
)
def test_inconsistent_numbers_are_named(change: dict[str, Any], named: str) -> None:
    """Each error begins with the value that does not fit."""
    with pytest.raises(PlacementError, match=named):
        Numbers(**GOOD | change)


def by_hand(*numbers: Any) -> dict[str, Any]:
    """Return the six numbers by name, in the order of Numbers."""
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    return dict(zip(names, numbers, strict=True))


def test_explicit_numbers() -> None:
    """Given address and port; rank 0 hosts the store."""
    place = launch.explicit(GOOD, "chief", 4711, {})
    assert (place.launcher, place.store, place.hosts_store) == ("explicit", ("chief", 4711), True)
    with pytest.raises(PlacementError, match="chief_ip is missing: cross_size is 2"):
        launch.explicit(GOOD, None, 4711, {})
    with pytest.raises(PlacementError, match="chief_port is missing"):
        launch.explicit(GOOD, "chief", None, {})
    with pytest.raises(PlacementError, match="chief_port is 0"):
        launch.explicit(by_hand(1, 2, 1, 2, 0, 1), None, 0, {})
    assert launch.explicit(by_hand(0, 1, 0, 1, 0, 1), None, None, {}).store is None


def test_explicit_numbers_on_one_node_need_no_port() -> None:
    """Whoever has started all of them names the job; with ``elaunch wrap`` between, it says who."""
    numbers = [by_hand(rank, 2, rank, 2, 0, 1) for rank in range(2)]
    one, other = (launch.explicit(each, "127.0.0.1", None, {}).store for each in numbers)
    assert one == other and one is not None and 20000 <= one[1] < 30000
    wrapped = launch.explicit(numbers[0], None, None, {"ELAUNCH_STARTER": "1.2"}).store
    assert wrapped is not None and wrapped != one
    assert launch.explicit(numbers[0], None, None, {"MASTER_PORT": "9"}).store == (
        "127.0.0.1",
        9,
    )


@pytest.mark.parametrize(
    ("sizes", "place"),
    [([2, 3], place) for place in [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1), (4, 2, 1)]]
    + [((3, 2), place) for place in [(0, 0, 0), (2, 2, 0), (3, 0, 1), (4, 1, 1)]],
)
def test_explicit_numbers_of_unequal_nodes(sizes: list[int], place: tuple[int, int, int]) -> None:
    """Five ranks on two nodes, 2 + 3 or 3 + 2: each rank gives the ranks of all nodes."""
    rank, local_rank, node = place
    found = launch.explicit(by_hand(rank, 5, local_rank, sizes, node, 2), "chief", 4711, {})
    assert (found.rank, found.local_size) == (rank, sizes[node])


@pytest.mark.parametrize(
    ("six_", "named"),
    [
        ((0, 5, 0, 2, 0, 2), "size is 5, but local_size 2 × cross_size 2 is 4; .* as a list of 2"),
        ((1, 5, 1, 2, 0, 2), "size is 5, but local_size 2 × cross_size 2 is 4"),
        ((2, 5, 0, 2, 1, 2), "size is 5, but local_size 2 × cross_size 2 is 4"),
        ((0, 5, 0, [2, 3, 1], 0, 2), "3 numbers, but cross_size is 2"),
        ((0, 5, 0, [2, 2], 0, 2), r"local_size is \[2, 2\], together 4, but size is 5"),
        ((1, 5, 0, [2, 3], 0, 2), "rank is 1, but local_size .* on node 0 .* make it 0"),
        ((2, 5, 1, [2, 3], 1, 2), "rank is 2, but local_size .* on node 1 .* make it 3"),
        ((0, 5, 0, [2, 3], 5, 2), "cross_rank is 5, but cross_size is 2"),
        ((0, 5, 0, [2, 3.0], 0, 2), "3.0 is no number of ranks"),
        ((0, 5, 0, "23", 0, 2), "local_size is '2', which is no whole number"),
    ],
)
def test_explicit_numbers_that_no_nodes_have(six_: tuple[Any, ...], named: str) -> None:
    """Every rank sees it by itself, and none of them waits for the others."""
    with pytest.raises(PlacementError, match=named):
        launch.explicit(by_hand(*six_), "chief", 4711, {})


@pytest.mark.parametrize("environ", [TORCH, ELAUNCH])
def test_explicit_numbers_below_a_launcher(environ: dict[str, str]) -> None:
    """A script that starts its own workers: they meet in the store of what started the script."""
    place = launch.explicit(by_hand(1, 2, 1, 2, 0, 1), "10.0.0.1", None, environ)
    assert (place.store, place.hosts_store) == (("node0", 1234), False)
    assert place.run_id == "job" and place.scope != launch.current(environ).scope
    under_mpi = launch.explicit(by_hand(1, 2, 1, 2, 0, 1), None, None, open_mpi(0, 2, 0, 2))
    assert under_mpi.store is not None and under_mpi.hosts_store


RESUMED = ELAUNCH | {
    "ELAUNCH_RESTART_REASON": "rank 1 exited with code 7",
    "ELAUNCH_CHECKPOINT_DIR": "/saves",
    "ELAUNCH_RESUME_FROM": "/saves/step_10.pt",
    "ELAUNCH_RESUME_STEP": "10",
}


def test_all_facts_under_elaunch() -> None:
    """Determined's five facts under their names here, and what goes beyond."""
    info = read(RESUMED)
    assert info.node_addrs == ("10.0.0.1", "10.0.0.2")
    assert (info.node_rank, info.nodes) == (1, 2)
    assert (info.slots, info.slot_ids) == (2, (0, 1))
    assert (info.rank, info.local_rank, info.world_size) == (3, 1, 4)
    assert (info.resume_from, info.resume_step) == (Path("/saves/step_10.pt"), 10)
    assert (info.run_id, info.round, info.launcher) == ("job", 5, "elaunch")
    assert info.restart_reason == "rank 1 exited with code 7"
    assert info.checkpoint_dir == Path("/saves")


def test_a_fresh_start() -> None:
    """Empty variables are no checkpoint."""
    fresh = read(RESUMED | {"ELAUNCH_RESUME_FROM": "", "ELAUNCH_RESUME_STEP": ""})
    assert (fresh.resume_from, fresh.resume_step) == (None, None)
    unnumbered = read(RESUMED | {"ELAUNCH_RESUME_STEP": ""})
    assert unnumbered.resume_from is not None and unnumbered.resume_step is None


def test_under_other_launchers() -> None:
    """What they say of the nodes; nothing to resume from."""
    assert read(TORCH).node_addrs == ()
    assert read(TORCH).run_id == "job"
    assert read(SLURM).node_addrs == ("n07", "n08")
    assert read(open_mpi(1, 2, 1, 2)).node_addrs == ("127.0.0.1",)
    alone = read({"ELAUNCH_RESUME_FROM": "/left/over"})
    assert (alone.launcher, alone.resume_from, alone.world_size) == ("alone", None, 1)


def test_a_step_that_is_none() -> None:
    """Named."""
    with pytest.raises(PlacementError, match="ELAUNCH_RESUME_STEP='x'"):
        read(RESUMED | {"ELAUNCH_RESUME_STEP": "x"})


def test_it_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public names, without init."""
    for name, value in RESUMED.items():
        monkeypatch.setenv(name, value)
    assert elaunch.info() == read(RESUMED)
    assert elaunch.latest_checkpoint() == Path("/saves/step_10.pt")


def test_hyperparameters() -> None:
    """Those of the job file, under whatever launcher; what is none is named."""
    info = read(TORCH | {"ELAUNCH_HPARAMS": '{"lr": 0.1, "layers": [1, 2]}'})
    assert info.hparams == {"lr": 0.1, "layers": [1, 2]}
    assert read(TORCH).hparams == {}
    assert hash(info) is not None
    for text in ("[1]", "{"):
        with pytest.raises(PlacementError, match="ELAUNCH_HPARAMS="):
            read(TORCH | {"ELAUNCH_HPARAMS": text})


def test_nothing_heavy_is_imported() -> None:
    """A script pays for what it uses."""
    code = "import sys, elaunch; elaunch.info(); print([m for m in ('torch', 'numpy', 'asyncio', "
    code += "'multiprocessing', 'psutil', 'click') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


SCRIPT = """
import elaunch, json, os, sys, time
from pathlib import Path

info = elaunch.info()
before = elaunch.latest_checkpoint()
saves = info.checkpoint_dir
if info.round == 1 and info.rank == 0:
    (saves / "step_10.pt").rename(saves / "step_20.pt")  # a newer one, meanwhile
facts = {name: getattr(info, name) for name in
         ("round", "rank", "node_rank", "slots", "world_size", "resume_step", "launcher")}
facts |= {"addrs": info.node_addrs, "from": str(info.resume_from), "latest": str(before),
          "same": before == elaunch.latest_checkpoint(), "reason": bool(info.restart_reason)}
os.write(1, (json.dumps(facts) + "\\n").encode())
if info.round == 0:
    (saves / f"up{info.rank}").touch()
    if info.rank == 1:
        import torch
        while not (saves / "up0").exists():
            time.sleep(0.01)
        torch.save({"step": 10}, saves / "part")
        (saves / "part").rename(saves / "step_10.pt")
        sys.exit(7)
    time.sleep(600)
"""


@pytest.mark.slow
def test_in_both_rounds_of_a_real_job(elaunch: Launcher, tmp_path: Path) -> None:
    """None at the first start; after a restart the same path and step on every rank."""
    saves = tmp_path / "saves"
    saves.mkdir()
    script = tmp_path / "s.py"
    script.write_text(SCRIPT)
    flags = ["--nproc-per-node=2", "--max-restarts=1", f"--checkpoint-dir={saves}"]
    flags += ["--checkpoint-glob=step_*.pt"]
    done = elaunch.run(["run", *flags, script])
    assert done.returncode == 0, done.stderr
    facts = [json.loads(line) for line in re.findall(r"\{.*\}", done.stdout)]
    for round_number, chosen in ((0, "None"), (1, str(saves / "step_10.pt"))):
        rows = sorted((f for f in facts if f["round"] == round_number), key=lambda f: f["rank"])
        assert [row["rank"] for row in rows] == [0, 1]
        for row in rows:
            assert (row["from"], row["latest"], row["same"]) == (chosen, chosen, True)
            assert row["resume_step"] == (10 if round_number else None)
            assert row["reason"] is bool(round_number)
            assert (row["node_rank"], row["slots"], row["world_size"]) == (0, 2, 2)
            assert row["launcher"] == "elaunch" and len(row["addrs"]) == 1


@pytest.mark.slow
def test_hyperparameters_of_a_real_job(elaunch: Launcher, tmp_path: Path) -> None:
    """By ``info`` and by the context; a job inside of it has its own, or none."""
    script, inner, file = tmp_path / "s.py", tmp_path / "inner.py", tmp_path / "job.yaml"
    inner.write_text("import elaunch; print('inner', dict(elaunch.info().hparams), flush=True)")
    script.write_text(
        "import elaunch, subprocess, sys\n"
        "with elaunch.init(announce=False) as ctx:\n"
        "    print(dict(ctx.info.hparams), flush=True)\n"
        f"run = [sys.executable, '-m', 'elaunch', 'run', '--preload=none', {str(inner)!r}]\n"
        "subprocess.run(run, check=True)\n"
    )
    file.write_text(f"entrypoint: {script}\nhyperparameters: {{lr: 0.1, tags: [a, b]}}\n")
    done = elaunch.run(["run", "-f", file])
    assert done.returncode == 0, done
    assert done.stdout.splitlines() == ["{'lr': 0.1, 'tags': ['a', 'b']}", "inner {}"]
