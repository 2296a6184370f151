"""The command line of ``elaunch wrap``: mistakes are found before anything starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from elaunch.cli import execute
from elaunch.cli.wrap import WRAP_FLAGS

ONE = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1",
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take away what a launcher around the tests may have set."""
    for name in os.environ:
        if name.startswith(("OMPI_", "PMI", "SLURM_", "MV2_", "HOROVOD_", "MASTER_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ELAUNCH_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    yield


@pytest.mark.parametrize(
    ("environ", "words", "message"),
    [
        ({}, [], "nothing to start; give a command"),
        ({}, ["--"], "nothing to start; give a command"),
        ({}, ["true"], "no launcher says which rank this is: none of OMPI_COMM_WORLD_RANK, "),
        ({}, ["true"], "`mpirun -np 4 elaunch wrap -- COMMAND`"),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, ["true"], "put `srun` before `elaunch wrap`"),
        (
            ONE,
            ["--rank-env", "OMPI_COMM_WORLD_RNK", "true"],
            "OMPI_COMM_WORLD_RNK is not set; did you mean 'OMPI_COMM_WORLD_RANK'?",
        ),
        (ONE, ["--rank-env=A,B", "true"], "are all not set; OMPI_COMM_WORLD_RANK is set"),
        ({}, ["--rank-env", ",", "true"], "--rank-env: it names no variable"),
        ({"R": "x"}, ["--rank-env", "R", "true"], "R='x' is not a number of 0 or more"),
        ({"R": "1"}, ["--rank-env=R", "--master-port=9", "true"], "set WORLD_SIZE for each rank"),
        (ONE, ["--rank-env", "5", "true"], "rank is 5, but size is 2"),
        (ONE, ["--master-port", "70000", "true"], "--master-port: '70000' is more than 65535"),
        (ONE, ["--tee", "9", "true"], "--tee: '9' is neither 0, 1, 2 or 3"),
        (ONE, ["--shutdown_timeout", "soon", "true"], "'soon' is not a number of seconds"),
        (ONE, ["--no-such-flag", "true"], "--no-such-flag"),
        (ONE, ["--log-dir", "/proc/nowhere", "true"], "--log-dir /proc/nowhere: cannot create"),
    ],
)
def test_mistakes_end_with_2(
    environ: dict[str, str],
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One message that names what is wrong and what to do; no traceback."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert execute(["wrap", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


@pytest.mark.parametrize("flags", [[], ["--master-port"]])
def test_a_port_that_is_taken_is_an_error_of_rank_0(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the port, who has it, and the flag; other ranks go on to meet rank 0."""
    from elaunch.launchers import derived_port

    for name, value in ONE.items():
        monkeypatch.setenv(name, value)
    for job in range(50):  # a job whose port is free now
        with socket.socket() as taken:
            port = derived_port(f"mpi-{job}")
            try:
                taken.bind(("127.0.0.1", port))
            except OSError:
                continue
            taken.listen()
            monkeypatch.setenv("PMIX_NAMESPACE", str(job))
            given = [*flags, str(port)] if flags else []
            assert execute(["wrap", *given, "true"]) == 2
        break
    said = capsys.readouterr().err
    assert f"port {port}" in said and f"process {os.getpid()}" in said
    assert "--master-port PORT" in said


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """And ``elaunch --help`` names the command."""
    assert execute(["wrap", "--help"]) == 0
    text = capsys.readouterr().out
    assert [flag.name for flag in WRAP_FLAGS if f"--{flag.name}" not in text] == []
    assert execute(["--help"]) == 0
    assert "wrap" in capsys.readouterr().out
