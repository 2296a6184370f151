"""What ``elaunch wrap`` decides before it starts anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elaunch.agent.wrap.plan import WrapPlan, WrapRequest, plan
from elaunch.config.values import StreamMap
from elaunch.errors import UsageError
from elaunch.proc import process_name
from elaunch.training import launch

COMMAND = ("python3.11", "s.py")


def open_mpi(
    rank: int = 1, size: int = 4, local_rank: int = 1, local_size: int = 2
) -> dict[str, str]:
    """Return the variables of a rank on one of two nodes."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_MCA_orte_num_nodes": "2",
        "PMIX_NAMESPACE": "77",
        "MASTER_ADDR": "a",
    }


def planned(environ: dict[str, str], request: WrapRequest | None = None) -> WrapPlan:
    """Return the plan of python3.11 s.py."""
    return plan(request or WrapRequest(COMMAND), environ)


def test_torchruns_variables() -> None:
    """All of them but the agent store, and none of elaunch's own."""
    environ = planned(open_mpi(rank=3)).environ
    said = {
        name: environ[name]
        for name in "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE "
        "ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR TORCHELASTIC_RUN_ID "
        "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS".split()
    }
    assert list(said.values()) == "3 4 1 2 1 2 3 4 default a mpi-77 0 0".split()
    assert 20000 <= int(environ["MASTER_PORT"]) < 30000
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environ
    assert [name for name in environ if name.startswith("ELAUNCH")] == []
    assert environ["PYTHONUNBUFFERED"] == "1"


def test_the_script_finds_its_place() -> None:
    """What is set here is read by the script's side: the same numbers, rank 0 hosts the store."""
    environ = planned(open_mpi(rank=3)).environ
    place, direct = launch.current(environ), launch.current(open_mpi(rank=3))
    assert place.launcher == "mpi" and place.hosts_store
    assert (place.store, place.run_id) == (direct.store, direct.run_id)
    assert (place.rank, place.cross_rank) == (direct.rank, direct.cross_rank)


def test_the_command_line_says_where_rank_0_is() -> None:
    """Before the environment."""
    request = WrapRequest(COMMAND, master_addr="b", master_port=4711)
    environ = planned(open_mpi() | {"MASTER_PORT": "5"}, request).environ
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("b", "4711")
    assert planned(open_mpi() | {"MASTER_PORT": "5"}).environ["MASTER_PORT"] == "5"


def test_inside_a_job_of_elaunch_its_store_and_run_stay() -> None:
    """A worker that calls mpirun: only the numbers change."""
    outer = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_PORT": "5",
        "ELAUNCH_RUN_ID": "outer",
        "ELAUNCH_ROUND": "2",
        "ELAUNCH_RESUME_FROM": "/saves/10",
        "TORCHELASTIC_RUN_ID": "outer",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    environ = planned(open_mpi() | outer).environ
    numbers = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}
    for name, value in (outer | numbers).items():
        assert environ[name] == value
    assert launch.current(environ).hosts_store is False


def test_the_rank_may_come_from_elsewhere() -> None:
    """A variable, the first of several, or a number; the rest comes from the launcher."""
    environ = {"MINE": "0", "OTHER": "9"} | open_mpi()
    for rank_env in ("MINE", "NONE,MINE,OTHER", "0"):
        request = WrapRequest(COMMAND, rank_env=rank_env)
        made = planned(environ | {"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, request).environ
        assert (made["RANK"], made["WORLD_SIZE"], made["GROUP_RANK"]) == ("0", "4", "0")


def test_a_rank_of_ones_own_with_a_size_needs_the_rest() -> None:
    """Torch's names stand for what the user's variable does not say."""
    request = WrapRequest(COMMAND, rank_env="MINE")
    own = {"MINE": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert planned(own | {"MASTER_PORT": "9"}, request).environ["GROUP_WORLD_SIZE"] == "1"
    for name in ("LOCAL_WORLD_SIZE", "MASTER_PORT"):
        lacking = {k: v for k, v in (own | {"MASTER_PORT": "9"}).items() if k != name}
        with pytest.raises(UsageError, match=name):
            planned(lacking, request)


@pytest.mark.parametrize("rank_env", ["MINE", "3"])
@pytest.mark.parametrize(
    "around",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"},
    ],
    ids=["alone", "in the only worker", "in a worker of eight"],
)
def test_a_bare_rank_is_enough(around: dict[str, str], rank_env: str, tmp_path: Path) -> None:
    """As with ``wrap_rank``: the lines carry it, files go by it, the variables stay as they are."""
    environ = {"MINE": "3", **around}
    made = planned(environ, WrapRequest(COMMAND, rank_env=rank_env, log_dir=tmp_path))
    assert made.rank == 3
    assert made.logs.prefix(made.rank, made.rank) == b"[default3]:"
    error_file = made.environ["TORCHELASTIC_ERROR_FILE"]
    assert error_file == str(tmp_path / "wrap" / "attempt_0" / "3" / "error.json")
    ours = {"TORCHELASTIC_ERROR_FILE": error_file, "PYTHONUNBUFFERED": "1"}
    ours["ELAUNCH_STARTER"] = process_name(os.getppid())
    assert made.environ == {**environ, **ours}


def test_a_bare_rank_has_no_place_to_meet() -> None:
    """Where a meeting point is given, the size is needed."""
    request = WrapRequest(COMMAND, rank_env="3", master_port=4711)
    with pytest.raises(UsageError, match="set WORLD_SIZE for each rank"):
        planned({}, request)


def test_one_rank_by_itself_has_a_place_to_meet() -> None:
    """init_process_group wants an address also for one rank."""
    environ = planned({"RANK": "0", "WORLD_SIZE": "1"}).environ
    assert environ["MASTER_ADDR"] == "127.0.0.1" and int(environ["MASTER_PORT"])


def test_slurms_restarts_are_rounds(tmp_path: Path) -> None:
    """A requeued job keeps the files of its earlier life."""
    slurm = {
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_RESTART_COUNT": "3",
    }
    made = planned(slurm, WrapRequest(COMMAND, log_dir=tmp_path))
    assert made.round == 3 and made.environ["TORCHELASTIC_RESTART_COUNT"] == "3"
    assert made.environ["TORCHELASTIC_ERROR_FILE"] == str(
        tmp_path / "slurm-12.0" / "attempt_3" / "1" / "error.json"
    )


def test_prefixes_and_streams() -> None:
    """The prefix has the global rank; flags by local rank mean the local one."""
    request = WrapRequest(COMMAND, tee=StreamMap(0, {1: 2}), role="train")
    logs = planned(open_mpi(rank=3), request).logs
    assert logs.prefix(3, 3) == b"[train3]:"
    assert (logs.tees(3, "stdout"), logs.tees(3, "stderr")) == (False, True)
    template = "${role_name} ${rank}/${local_rank}> "
    environ = open_mpi(rank=3) | {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": template}
    assert planned(environ).logs.prefix(3, 3) == b"default 3/1> "


@pytest.mark.parametrize(
    ("word", "python"),
    [("python", True), ("/usr/bin/python3.11", True), ("pythonic", False), ("bash", False)],
)
def test_python_is_known(word: str, python: bool) -> None:
    """Its helpers are its own to end."""
    assert planned(open_mpi(), WrapRequest((word,))).is_python is python
