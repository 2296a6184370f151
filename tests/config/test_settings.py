"""From words, variables and files to one settings object, or to one usage error."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from elaunch.config import StreamMap
from elaunch.errors import UsageError
from tests.config.resolving import Job


def test_the_defaults(job: Job) -> None:
    """What a bare ``elaunch run train.py`` means."""
    found = job.settings()
    assert (found.entrypoint, found.args, found.mode, found.name) == (
        "train.py",
        (),
        "script",
        "train",
    )
    assert found.run_id.startswith("train-") and not found.run_id_given
    assert (found.min_nodes, found.max_nodes, found.nproc_per_node) == (1, 1, "1")
    assert (found.master_addr, found.master_port, found.rdzv_backend) == (None, None, "c10d")
    assert (found.max_restarts, found.restart_budget, found.start_method) == (
        0,
        "progress",
        "forkserver",
    )
    assert (found.preload, found.interpreter, found.workdir) == (
        ("torch", "+torch._dynamo"),
        sys.executable,
        None,
    )
    assert (found.shutdown_timeout, found.sibling_grace) == (30.0, 5.0)
    assert [each.name for each in found.signals_to_handle] == [
        "SIGTERM",
        "SIGINT",
        "SIGHUP",
        "SIGQUIT",
    ]
    assert (found.redirects, found.log_dir, found.log_level) == (StreamMap(), None, "WARNING")
    assert found.notices == ()


@pytest.mark.parametrize(
    ("flags", "grace"),
    [
        ("--shutdown-timeout=2", 2.0),
        ("--shutdown-timeout=60", 5.0),
        ("--shutdown-timeout=2 --sibling-grace=9", 9.0),
    ],
)
def test_siblings_have_no_more_time_than_a_shutdown(job: Job, flags: str, grace: float) -> None:
    """Unless the user says so."""
    assert job.settings(f"{flags} train.py").sibling_grace == grace


def test_only_a_job_of_one_node_waits_for_children(job: Job) -> None:
    """Other nodes could begin a round beside them."""
    flags = "--wait-for-children=10m --rdzv-backend=etcd --rdzv-endpoint=e1 --rdzv-id=j"
    assert job.settings(f"{flags} --nnodes=1 train.py").wait_for_children == 600.0
    with pytest.raises(UsageError, match="--wait-for-children: only for a job of one node"):
        job.settings(f"{flags} --nnodes=1:2 train.py")


def test_the_command_line_wins_over_variables_and_these_over_the_file(job: Job) -> None:
    """Command line, ELAUNCH_, PET_, job file, default."""
    job.write("j.yaml", "entrypoint: train.py\nmax_restarts: 1\n")
    line = "-f j.yaml"
    assert job.settings("train.py").max_restarts == 0
    assert job.settings(line).max_restarts == 1
    assert job.settings(line, PET_MAX_RESTARTS="2").max_restarts == 2
    assert job.settings(line, PET_MAX_RESTARTS="2", ELAUNCH_MAX_RESTARTS="3").max_restarts == 3
    assert job.settings(line + " --max-restarts 4", ELAUNCH_MAX_RESTARTS="3").max_restarts == 4
    assert job.settings(line, PET_MAX_RESTARTS="").max_restarts == 1


@pytest.mark.parametrize(("text", "standalone"), [("1", True), ("0", False), ("true", True)])
def test_a_switch_in_a_variable(job: Job, text: str, standalone: bool) -> None:
    """Torchrun takes integers only."""
    assert job.settings(PET_STANDALONE=text).standalone is standalone


def test_a_variable_can_be_set_off_on_the_command_line(job: Job) -> None:
    """Torchrun has no way to do that."""
    assert not job.settings("--standalone=no train.py", PET_STANDALONE="1").standalone


@pytest.mark.parametrize(
    ("line", "environ", "message"),
    [
        (
            "--max-restarts abc train.py",
            {},
            "--max-restarts: 'abc' is not a whole number (allowed: 0 or more)",
        ),
        (
            "train.py",
            {"PET_MAX_RESTARTS": "abc"},
            "--max-restarts: 'abc' is not a whole number "
            "(from PET_MAX_RESTARTS; allowed: 0 or more)",
        ),
        (
            "train.py",
            {"PET_START_METHOD": "spwan"},
            "--start-method: 'spwan' is not known; did you mean 'spawn'? (from PET_START_METHOD; "
            "allowed: forkserver, spawn, fork)",
        ),
        (
            "--node-rank= train.py",
            {},
            "--node-rank: '' is not a whole number; it is empty: a variable that is not set?",
        ),
        (
            "--node-rank ${RANK_OF_NODE} train.py",
            {},
            "'${RANK_OF_NODE}' is not a whole number; nothing has put the variable's value in its "
            "place: a shell does where it is not in single quotes, Kubernetes for $(NAME)",
        ),
        (
            "--max-restarts $(RESTARTS) train.py",
            {},
            "'$(RESTARTS)' is not a whole number; nothing has put the variable's value in",
        ),
        ("train.py", {"PET_NNODES": "$N"}, "nothing has put the variable's value in its place"),
        ("train.py", {"PET_STANDALONE": "ture"}, "did you mean 'true'? (from PET_STANDALONE"),
        ("train.py", {"LOGLEVEL": "infos"}, "did you mean 'INFO'? (from LOGLEVEL"),
        ("train.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
        ("train.py", {"TORCHELASTIC_HEALTH_CHECK_PORT": "x"}, "TORCHELASTIC_HEALTH_CHECK_PORT"),
        ("train.py", {"TORCHELASTIC_HEALTH_CHECK_PORT": "70000"}, "is more than 65535"),
        ("train.py", {"PYTHON_EXEC": "/no/python"}, "PYTHON_EXEC: '/no/python'"),
        ("--logs-specs mine train.py", {}, "--logs-specs: 'mine' names a class"),
        ("--logs-specs Default train.py", {}, "--logs-specs: 'Default' names a class"),
        ("-m --no-python train.py", {}, "--module and --no-python"),
        ("-m --run-path train.py", {}, "--module and --run-path"),
        ("", {}, "nothing to start"),
        ("python train.py", {}, "leave 'python' out: Python runs the script anyway"),
        ("python3.11 -u train.py", {}, "leave 'python3.11' out"),
        ("/bin/sh -c train.py", {}, "is a program, not a Python script; to start it, use --no-py"),
        (f"{sys.executable} train.py", {}, f"leave {sys.executable!r} out"),
        ("tain.py", {}, "script 'tain.py' does not exist; did you mean 'train.py'?"),
        ("none/x.py", {}, "there is no directory"),
        ("--nproc-per-node 2 -", {}, "script '-': several workers cannot read one stdin"),
        ("--nproc-per-node auto -", {}, "script '-': several workers cannot read one stdin"),
        ("--detach -", {}, "script '-': a job in the background has no stdin"),
        ("--max-restarts 1 -", {}, "script '-': after a restart a worker would find the stdin em"),
        ("/dev/fd/63", {}, "script '/dev/fd/63' does not exist"),
        ("-- --max-restarts", {}, "flags come before the script"),
        (".", {}, "without a __main__.py"),
        ("-m tain", {}, "--module: 'tain' was not found; did you mean 'train'?"),
        ("-m train.py", {}, "did you mean 'train'?"),
        ("-m ./train", {}, "did you mean 'train'?"),
        ("-m ./sub/../train.py", {}, "did you mean 'train'?"),
        ("--no-python nosuchprogram", {}, "is not on PATH"),
        ("--no-python ./train.py", {}, "cannot be executed"),
        ("--no-python ./tain.py", {}, "did you mean 'train.py'?"),
        ("-C nowhere train.py", {}, "--workdir: 'nowhere' does not exist"),
        ("-C train.py train.py", {}, "is not a directory"),
        ("--log-dir train.py train.py", {}, "--log-dir: 'train.py' is a file"),
        ("--log-dir train.py/x train.py", {}, "which is a file"),
        ("--checkpoint-dir train.py train.py", {}, "is a file, not a directory"),
        ("--checkpoint-glob *.pt train.py", {}, "add --checkpoint-dir"),
        ("--require-resume train.py", {}, "has no directory to look in; add --checkpoint-dir"),
        ("--checkpoint-dir d --checkpoint-glob /x train.py", {}, "is absolute"),
        ("train.py --resume {checkpoint}", {}, "needs --checkpoint-dir"),
        ("--preload nosuchmodule train.py", {}, "names nosuchmodule, which was not found"),
        ("--forward-signals SIGTERM train.py", {}, "could no longer be stopped"),
        (
            "--forward-signals SIGUSR1 --signals-to-handle SIGUSR1,SIGTERM train.py",
            {},
            "which --signals-to-handle has too",
        ),
        ("--signals-to-handle= train.py", {}, "names no signal"),
        (
            "--virtual-local-rank --nproc-per-node 3 train.py",
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            "--virtual-local-rank: gives each of 3 workers a GPU, but CUDA_VISIBLE_DEVICES='0,1' "
            "has 2",
        ),
        (
            "--virtual-local-rank --nproc-per-node 3 train.py",
            {"CUDA_VISIBLE_DEVICES": "0,1,2", "HIP_VISIBLE_DEVICES": "4"},
            "but HIP_VISIBLE_DEVICES='4' has 1",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    job: Job, line: str, environ: dict[str, str], message: str
) -> None:
    """Flag, value, source, reason, and what to do."""
    assert message in job.error(line, **environ)


def test_more_workers_than_gpus_is_remarked_on(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job on CPUs may want that, so it starts; the number of GPUs is the mock."""
    monkeypatch.setattr("elaunch.config.checks.installed_gpus", lambda: 4)
    assert job.settings("--nproc-per-node 4 train.py").notices == ()
    (notice,) = job.settings("--nproc-per-node 8 train.py").notices
    assert "8 workers share 4 visible GPUs" in notice
    (notice,) = job.settings("--nproc-per-node 2 train.py", CUDA_VISIBLE_DEVICES="3").notices
    assert "2 workers share 1 visible GPU" in notice
    assert job.settings("--nproc-per-node 8 train.py", CUDA_VISIBLE_DEVICES="").notices == ()
    line = "--virtual-local-rank --nproc-per-node 8 train.py"
    assert "this machine has 4" in job.error(line)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_rights_are_checked(job: Job) -> None:
    """A script that cannot be read, a log directory that cannot be written."""
    job.write("secret.py", "").chmod(0)
    assert "may not be read" in job.error("secret.py")
    (job.directory / "closed").mkdir(mode=0o500)
    assert "cannot be written" in job.error("--log-dir closed/logs train.py")


def test_relative_paths_start_in_the_workdir(job: Job) -> None:
    """-C is as if elaunch had been started there."""
    job.write("sub/inner.py", "")
    found = job.settings("-C sub --log-dir logs --checkpoint-dir ck inner.py")
    sub = job.directory / "sub"
    assert (found.workdir, found.log_dir, found.checkpoint_dir) == (
        sub,
        str(sub / "logs"),
        sub / "ck",
    )
    assert found.entrypoint == "inner.py"


def test_dev_null_is_kept_as_the_idiom_for_no_files(job: Job) -> None:
    """As under torchrun."""
    found = job.settings("--log-dir /dev/null -t 3 train.py")
    assert found.log_dir == "/dev/null"


@pytest.mark.parametrize(
    ("line", "mode", "name"),
    [
        ("-m train", "module", "train"),
        ("--run-path train.py", "run-path", "train"),
        ("--no-python sh -c true", "command", "sh"),
        ("--name digits train.py", "script", "digits"),
    ],
)
def test_modes_and_names(job: Job, line: str, mode: str, name: str) -> None:
    """The name is for reports; the run id begins with it."""
    found = job.settings(line, PATH=os.environ["PATH"])
    assert (found.mode, found.name) == (mode, name)
    assert found.run_id.startswith(name)


def test_a_script_that_can_be_read_once(job: Job) -> None:
    """A pipe: for one worker that is never restarted; a process substitution for none."""
    os.mkfifo(job.directory / "pipe")
    assert job.settings("pipe").entrypoint == "pipe"
    assert "several workers cannot read one pipe; save it" in job.error("--nproc-per-node 2 pipe")
    assert "find the pipe empty; save it" in job.error("--max-restarts 1 pipe")
    meet = "--rdzv-backend c10d --rdzv-endpoint h --rdzv-id x"
    assert "find the pipe empty; save it" in job.error(f"--nnodes 1:2 {meet} pipe")
    with open(job.directory / "train.py") as file:
        assert "no worker has this open file; save it" in job.error(f"/dev/fd/{file.fileno()}")


def test_a_directory_with_a_main_is_a_script(job: Job) -> None:
    """As for python itself."""
    job.write("app/__main__.py", "")
    assert job.settings("app").entrypoint == "app"


@pytest.mark.parametrize("flag", ["--rdzv-id", "--run-id", "--rdzv_id"])
def test_the_run_id_is_honoured_on_one_node(job: Job, flag: str) -> None:
    """Torchrun replaces it by a random one."""
    found = job.settings(f"{flag} 100 train.py")
    assert (found.run_id, found.run_id_given) == ("100", True)
    assert job.settings("train.py", ELAUNCH_RUN_ID="7").run_id == "7"


def test_variables_of_an_outer_job_are_not_flags_of_an_inner_one(job: Job) -> None:
    """A worker that starts elaunch has them from its agent."""
    outer = {
        "ELAUNCH_AGENT_SOCKET": "/x",
        "ELAUNCH_RUN_ID": "outer",
        "ELAUNCH_CHECKPOINT_DIR": "/ck",
        "ELAUNCH_ROUND": "0",
    }
    found = job.settings(**outer)
    assert found.run_id != "outer" and found.checkpoint_dir is None
    assert found.notices == ()


def test_a_signal_to_forward_leaves_the_default_list(job: Job) -> None:
    """SIGHUP ends a job by default; asked to be forwarded, it is only forwarded."""
    found = job.settings("--forward-signals SIGHUP,SIGUSR1 train.py")
    assert found.forward_signals == (signal.SIGHUP, signal.SIGUSR1)
    assert signal.SIGHUP not in found.signals_to_handle


def test_the_command_line_that_torchx_writes(job: Job) -> None:
    """Its dist.ddp gives an empty role to every job; torch's own log files have a name, too."""
    line = "--rdzv_backend c10d --rdzv_endpoint localhost:0 --rdzv_id app --nnodes 1 --node_rank 0"
    words = [*line.split(), "--tee", "3", "--role", "", "--logs-specs", "default", "train.py"]
    settings = job.of(words, {})
    assert (settings.role, settings.entrypoint) == ("", "train.py")
    assert not [notice for notice in settings.notices if "role" in notice or "logs" in notice]


def test_fork_is_another_name_for_the_fork_server(job: Job) -> None:
    """Torchrun's choices all parse."""
    assert job.settings("--start-method fork train.py").start_method == "forkserver"
    assert job.settings("--start-method spawn train.py").start_method == "spawn"


def test_the_interpreter_may_be_another(job: Job) -> None:
    """PYTHON_EXEC; the modules of another interpreter are not checked from here."""
    python = job.write("bin/python3", "#!/bin/sh\n")
    python.chmod(0o755)
    found = job.settings("-m not_here", PYTHON_EXEC=str(python))
    assert found.interpreter == str(python)


def test_shutdown_timeout_of_torchruns_variable(job: Job) -> None:
    """The flag and its own variables win over it."""
    old = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}
    assert job.settings(**old).shutdown_timeout == 7.0
    assert job.settings(**old, PET_SHUTDOWN_TIMEOUT="8").shutdown_timeout == 8.0


def test_variables_that_are_nearly_a_flags_name_are_remarked_on(job: Job) -> None:
    """A misspelt variable has no effect, and that is said."""
    notices = job.notices("train.py", ELAUNCH_MAX_RESTART="3", PET_OTHER="x")
    assert (
        notices == "the variable ELAUNCH_MAX_RESTART has no effect; did you mean "
        "ELAUNCH_MAX_RESTARTS?"
    )


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        ("--monitor-interval 1 train.py", "--monitor-interval has no effect"),
        ("--start-method spawn --preload torch train.py", "--preload has no effect"),
        ("--run-path --no-python train.py", "--no-python has no effect with --run-path"),
        ("--restart-budget lifetime train.py", "--restart-budget has no effect"),
        ("train.py --lr 1 --nproc_per_node 2", "--nproc_per_node stands after the script, so 't"),
        ("train.py --rdzv-backend=c10d", "flags of elaunch come before the script"),
    ],
)
def test_what_has_no_effect_is_said(job: Job, line: str, notice: str) -> None:
    """Only when it was given."""
    assert notice in job.notices(line)


def test_a_script_may_have_flags_of_its_own(job: Job) -> None:
    """Also those that elaunch has too, and a program that is a launcher."""
    assert job.notices("train.py --checkpoint-dir x --name y --env z -m --nproc-workers 2") == ""
    assert "stands after" not in job.notices("--no-python true --nproc-per-node 2")


@pytest.mark.parametrize(
    ("name", "text", "refused"),
    [
        ("go.sh", "#!/bin/bash\necho hello\n", True),
        ("go", "#!/usr/bin/env bash\necho hello\n", True),
        ("go.sh", "echo hello\n", True),
        ("train", "#!/usr/bin/env python3\nprint(1)\n", False),
        ("broken.py", "echo hello\n", False),  # Python itself says what is wrong
        ("both", '#!/bin/sh\n"exec" "python" "$0" "$@"\n', False),
    ],
)
def test_a_shell_script_needs_no_python(job: Job, name: str, text: str, refused: bool) -> None:
    """It is refused before anything starts; with --no-python it is a program."""
    (job.directory / name).write_text(text)
    (job.directory / name).chmod(0o755)
    if refused:
        told = f"script '{name}' is a shell script, not a Python script; to start it, use --no-py"
        assert told in job.error(name)
    else:
        job.settings(name)
    job.settings(f"--no-python ./{name}")


def test_variables_of_the_cluster_make_no_notice(job: Job) -> None:
    """Kubeflow's trainer sets these for every job."""
    found = job.settings(PET_MONITOR_INTERVAL="1", PET_NODE_RANK="0", PET_NNODES="1")
    assert found.notices == ()


def test_args_are_kept_to_the_byte(job: Job) -> None:
    """Nothing is substituted, split or dropped here."""
    args = ["--x", "", "a b", "$local_rank", "--", "-r3"]
    assert job.of(["train.py", *args], {}).args == tuple(args)


def test_the_checkpoint_directory_need_not_exist_yet(job: Job, tmp_path: Path) -> None:
    """The script makes it at its first save."""
    found = job.settings("--checkpoint-dir ck --checkpoint-glob step_*.pt train.py {checkpoint}")
    assert (found.checkpoint_dir, found.checkpoint_glob) == (tmp_path / "ck", "step_*.pt")


def test_the_pipe_of_torchs_timers(job: Job, tmp_path: Path) -> None:
    """Where nothing is, or a pipe that nobody reads; without the switch it is the script's."""
    enabled = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    path = job.directory / "pipe"
    given = {**enabled, "TORCHELASTIC_TIMER_FILE": "pipe"}
    assert (job.settings().file_timer, job.settings(**enabled).timer_file) == (False, None)
    assert job.settings(**given).timer_file == path
    inside = {**given, "ELAUNCH_AGENT_SOCKET": "/x"}  # an outer agent's pipe
    assert (job.settings(**inside).file_timer, job.settings(**inside).timer_file) == (True, None)
    os.mkfifo(path)
    assert job.settings(**given).timer_file == path
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    assert "'pipe' is in use: somebody reads it" in job.error(**given)
    os.close(reader)
    path.unlink()
    path.write_text("data")
    assert "'pipe' is there already, and no named pipe" in job.error(**given)
    assert job.settings(TORCHELASTIC_TIMER_FILE="pipe").timer_file is None
    given["TORCHELASTIC_TIMER_FILE"] = "no/pipe"
    assert "is in a directory that does not exist" in job.error(**given)
    assert "is neither yes nor no" in job.error(TORCHELASTIC_ENABLE_FILE_TIMER="x")


def test_a_device_that_no_torch_knows_is_refused_without_torch(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed plug-in of torch's may register any name; another Python may have one."""
    told = job.error("--nproc-per-node zwei train.py")
    assert told.startswith("--nproc-per-node: 'zwei' is neither a number nor a device to count")
    assert "cpu, gpu, auto" in told
    assert job.settings("--nproc-per-node npu train.py").nproc_per_node == "npu"
    other = job.directory / "python"
    other.symlink_to(sys.executable)
    assert job.settings("--nproc-per-node zwei train.py", PYTHON_EXEC=str(other))
    described = job.directory / "plugin-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Name: plugin\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[torch.backends]\nx = plugin:load\n")
    monkeypatch.syspath_prepend(job.directory)
    assert job.settings("--nproc-per-node zwei train.py").nproc_per_node == "zwei"
