"""What torchrun's own tests hold, as rows: a command line, variables, a script, what must be seen.

Written anew after pytorch's test/distributed/launcher (test_run.py), elastic/agent/server/test and
elastic/multiprocessing; the names say what each row is about. A row is run by torchrun and by
``python -m elaunch.torchrun``, in a directory of its own with SCRIPTS in it.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

NAMES = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK "
    "ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS "
    "TORCHELASTIC_RUN_ID TORCH_NCCL_ASYNC_ERROR_HANDLING OMP_NUM_THREADS CUDA_VISIBLE_DEVICES "
    "TORCHELASTIC_SIGNALS_TO_HANDLE"
).split()
"""The variables that a worker reports."""

CHANGING = frozenset({"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"})
"""Those that each launcher chooses, unless the row says what they are (docs/torchrun.md)."""

REPORT = f"""
import json, os, sys
def report(**more):
    names = {NAMES!r}
    found = {{name: os.environ.get(name) for name in names}} | {{"argv": sys.argv[1:]}} | more
    path = os.path.join(os.environ["OUT"], place(os.environ["RANK"]))
    with open(path + ".part", "w") as file:
        json.dump(found, file)
    os.rename(path + ".part", path)
def place(rank):
    return str(rank) + "." + os.environ["TORCHELASTIC_RESTART_COUNT"]
"""
SCRIPTS = {
    "report.py": REPORT
    + "report(main=__name__, near=sys.path[0] == os.path.dirname(os.path.realpath(__file__)))\n",
    "mod.py": REPORT + "report(package=__package__, file=os.path.basename(__file__))\n",
    "report.sh": 'printf \'{"argv": ["%s", "%s"], "RANK": "%s"}\' "$1" "$2" "$RANK"'
    ' > "$OUT/$RANK.$TORCHELASTIC_RESTART_COUNT"\n',
    "fails.sh": "exit 4\n",
    "fails.py": REPORT
    + textwrap.dedent("""
        # fails.py RANK HOW [TIMES]: end badly on a rank, so many times
        import signal, time
        report()
        rank, how, times = sys.argv[1], sys.argv[2], int((sys.argv[3:] or ["99"])[0])
        if rank in (os.environ["RANK"], "all"):
            everybody = {place(each) for each in range(int(os.environ["WORLD_SIZE"]))}
            until = time.monotonic() + 30  # nobody is ended before it has reported
            while not everybody <= set(os.listdir(os.environ["OUT"])) and time.monotonic() < until:
                time.sleep(0.01)
            if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < times:
                if how == "raise":
                    raise ValueError("boom")
                if how.startswith("SIG"):
                    os.kill(os.getpid(), getattr(signal, how))
                sys.exit(int(how))
        elif how == "raise":
            time.sleep(60)  # until it is ended
        """),
    "records.py": REPORT
    + textwrap.dedent("""
        # leave what torch's @record leaves, and fail
        report()
        text = {"py_callstack": "Traceback: here", "timestamp": "1700000000"}
        record = {"message": {"message": "ValueError: boom", "extraInfo": text}}
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            file.write(sys.argv[1] if sys.argv[1:] else json.dumps(record))
        sys.exit(5)
        """),
    "prints.py": textwrap.dedent("""
        import os, sys
        for name in ("stdout", "stderr"):
            for line in ("apple", "pear " + os.environ["RANK"], "last"):
                getattr(sys, name).write(f"{name} {line}\\n")  # in one write, as a whole line
        """),
    "sum.py": textwrap.dedent("""
        # the sum over all ranks, by the address that the launcher gives
        import os, sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        one = torch.ones(1)
        dist.all_reduce(one)
        launched = dist.is_torchelastic_launched()
        os.write(1, f"sum {int(one)} {launched}\\n".encode())  # as a whole line
        dist.barrier()
        dist.destroy_process_group()
        """),
}


@dataclass(frozen=True)
class Row:
    """One start.

    Attributes:
        line: the command line behind the launcher; CWD is the directory, PORT a free port.
        more: command lines of more agents of the same job.
        env: variables; FILE is the launcher's own error file.
        code: the exit code of both; None where they differ (docs/torchrun.md).
        rounds: the reports that there must be, as numbers of workers by round.
        env_is: variables that all workers must have, in the last round.
        out: lines of stdout, sorted.
        err: what stderr must have in it, of both.
        files: contents of the log files, by place in the round's directory; None: none is asked.
        error: what the launcher's own error file says, with the exit code.
        unlike: what of a report differs on purpose.
    """

    line: str
    more: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    code: int | None = 0
    rounds: tuple[int, ...] = (1,)
    env_is: Mapping[str, str] = field(default_factory=dict)
    out: tuple[str, ...] = ()
    err: str = ""
    files: Mapping[str, str] | None = None
    error: tuple[str, int] | None = None
    unlike: frozenset[str] = CHANGING


_CPUS = str(len(os.sched_getaffinity(0)))
BAD: Mapping[str, str] = {
    # Refused before anything starts; torchrun ends with a traceback and 1, or with 2.
    "nnodes that are no range": "--nnodes a report.py",
    "nnodes with three parts": "--nnodes 1:2:3 report.py",
    "nnodes of none": "--nnodes 0 report.py",
    "nnodes from more to fewer": "--nnodes 2:1 report.py",
    "nproc of nothing": "--nproc-per-node foo report.py",
    "nproc of none": "--nproc-per-node 0 report.py",
    "gpus where there are none": "--nproc-per-node gpu report.py",
    "xpus where there are none": "--nproc-per-node xpu report.py",
    "a negative number of restarts": "--max-restarts -1 report.py",
    "a backend that is none": "--rdzv-backend foo --rdzv-endpoint localhost:0 report.py",
    "a setting without a value": "--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-conf a= "
    "report.py",
    "module and no python": "--no-python -m mod",
    "streams that are none": "--redirects 7 report.py",
    "a filter that is no rank": "--local-ranks-filter a report.py",
    "logs of a class that is not there": "--logs-specs foo report.py",
    "a log directory that is a file": "--log-dir CWD/report.py report.py",
    "a program that is not there": "--no-python no_such_program",
    "a negative timeout": "--shutdown-timeout -1 report.py",
    "an unknown binding": "--numa-binding foo report.py",
    "an unknown flag": "--no-such-flag report.py",
    "no script": "",
}

_STATIC = "--nnodes 2 --master-addr 127.0.0.1 --master-port PORT"
ROWS: Mapping[str, Row] = {
    # ── launcher/test_run.py: how it is called ───────────────────────────────────────────────────
    "default number of workers": Row("report.py a --b", env_is={"WORLD_SIZE": "1"}),
    "a script": Row("--nproc-per-node 4 report.py", rounds=(4,), env_is={"OMP_NUM_THREADS": "1"}),
    "a script, the old spellings": Row(
        "--nnodes=1 --nproc_per_node=2 --monitor_interval=1 --start_method=spawn "
        "--master_addr=127.0.0.1 --master_port=PORT --node_rank=0 report.py",
        rounds=(2,),
        env_is={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "PORT"},
        unlike=frozenset({"TORCHELASTIC_RUN_ID"}),
    ),
    "a program": Row("--no-python --nproc-per-node 2 sh report.sh x y", rounds=(2,)),
    "a module": Row("--nproc-per-node 2 -m mod x --y", rounds=(2,), env={"PYTHONPATH": "CWD"}),
    "a path that is run": Row("--run-path CWD/report.py x", unlike=CHANGING | {"near"}),
    "standalone": Row("--standalone --nproc-per-node 2 report.py", rounds=(2,)),
    "standalone, with its own endpoint": Row(
        "--standalone --rdzv-backend static --rdzv-endpoint nowhere:1 report.py"
    ),
    "variables for flags": Row(
        "report.py",
        env={"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "2", "PET_ROLE": "r"},
        rounds=(3,),
        env_is={"ROLE_NAME": "r", "TORCHELASTIC_MAX_RESTARTS": "2"},
    ),
    "flags over variables": Row(
        "--nproc-per-node 2 --nnodes 1 report.py",
        env={"PET_NPROC_PER_NODE": "3", "PET_NNODES": "5"},
        rounds=(2,),
    ),
    "variables for switches": Row(
        "mod x", env={"PET_MODULE": "1", "PET_STANDALONE": "0", "PYTHONPATH": "CWD"}
    ),
    "one worker for each CPU": Row("--nproc-per-node cpu report.py", rounds=(int(_CPUS),)),
    "one worker for each device": Row("--nproc-per-node auto report.py", rounds=(int(_CPUS),)),
    "an elastic job of one node": Row(
        "--nnodes 1:1 --rdzv-backend c10d --rdzv-endpoint localhost:PORT --rdzv-id job "
        "--nproc-per-node 2 --max-restarts 3 report.py",
        rounds=(2,),
        env_is={"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_MAX_RESTARTS": "3"},
        unlike=frozenset({"MASTER_ADDR", "MASTER_PORT"}),
    ),
    "arguments of the script are its own": Row(
        "--nproc-per-node 2 report.py --nproc-per-node 7 -- $local_rank ${local_rank}x $$HOME",
        rounds=(2,),
    ),
    "a device for each worker": Row(
        "--nproc-per-node 2 --virtual-local-rank report.py",
        env={"CUDA_VISIBLE_DEVICES": "4,6"},
        rounds=(2,),
        env_is={"LOCAL_RANK": "0"},
    ),
    # ── agent/server/test: what a worker finds ───────────────────────────────────────────────────
    "NCCL errors, as they were": Row(
        "report.py",
        env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
        env_is={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
    ),
    "NCCL errors by default": Row("report.py", env_is={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}),
    "threads as they were": Row(
        "--nproc-per-node 2 report.py",
        env={"OMP_NUM_THREADS": "3"},
        rounds=(2,),
        env_is={"OMP_NUM_THREADS": "3"},
    ),
    "an outer launcher's variables": Row(
        "report.py",
        env={"RANK": "7", "LOCAL_RANK": "7", "WORLD_SIZE": "9", "MASTER_PORT": "1"},
        env_is={"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
    ),
    "signals by name": Row(
        "--signals-to-handle SIGTERM,SIGUSR2 report.py",
        env_is={"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGUSR2"},
    ),
    "all of these at once": Row(
        "--virtual-local-rank report.py --nproc-per-node 7 -- $local_rank ${local_rank}x $$HOME",
        env={
            "PET_NPROC_PER_NODE": "2",
            "PET_MAX_RESTARTS": "2",
            "PET_ROLE": "r",
            "CUDA_VISIBLE_DEVICES": "4,6",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "RANK": "7",
            "LOCAL_RANK": "7",
            "WORLD_SIZE": "9",
            "MASTER_PORT": "1",
        },
        rounds=(2,),
        env_is={
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "ROLE_NAME": "r",
            "TORCHELASTIC_MAX_RESTARTS": "2",
        },
    ),
    # ── agent/server/test: failures and restarts ─────────────────────────────────────────────────
    "an exit code": Row(
        "--nproc-per-node 2 fails.py 1 3", code=1, rounds=(2,), err="exitcode  : 3"
    ),
    "an exception": Row(
        "--nproc-per-node 2 fails.py 1 raise", code=1, rounds=(2,), err="ValueError: boom"
    ),
    "all fail": Row(
        "--nproc-per-node 3 fails.py all 1", code=1, rounds=(3,), err="fails.py FAILED"
    ),
    "a signal": Row(
        "--nproc-per-node 2 fails.py 0 SIGKILL", code=1, rounds=(2,), err="exitcode  : -9"
    ),
    "a segmentation fault": Row("fails.py 0 SIGSEGV", code=1, err="(SIGSEGV)"),
    "a rank fails once": Row(
        "--nproc-per-node 2 --max-restarts 3 fails.py 1 4 1",
        rounds=(2, 2),
        env_is={"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3"},
    ),
    "a rank fails once, by exception": Row("--max-restarts 1 fails.py 0 raise 1", rounds=(1, 1)),
    "no restart is left": Row("--max-restarts 2 fails.py 0 6", code=1, rounds=(1, 1, 1)),
    "a program fails": Row("--no-python sh fails.sh", code=1, rounds=(), err="exitcode  : 4"),
    # ── elastic/multiprocessing/errors: error files ──────────────────────────────────────────────
    "an error file": Row(
        "records.py", env={"TORCHELASTIC_ERROR_FILE": "FILE"}, code=1, error=("ValueError: boom", 5)
    ),
    "an error file without a wish for it": Row("records.py", code=1, err="Traceback: here"),
    # ── elastic/multiprocessing: streams ─────────────────────────────────────────────────────────
    "streams of the console": Row(
        "--nproc-per-node 2 prints.py",
        rounds=(),
        out=tuple(
            f"stdout {word}" for word in ("apple", "pear 0", "last", "apple", "pear 1", "last")
        ),
    ),
    "streams to files": Row(
        "--nproc-per-node 2 --log-dir CWD/logs -r 3 prints.py",
        rounds=(),
        files={
            f"{rank}/{stream}.log": f"{stream} apple\n{stream} pear {rank}\n{stream} last\n"
            for rank in range(2)
            for stream in ("stdout", "stderr")
        },
    ),
    "one stream of one rank to a file": Row(
        "--nproc-per-node 2 --log-dir CWD/logs -r 1:1 prints.py",
        rounds=(),
        out=("stdout apple", "stdout last", "stdout pear 0"),
        files={"1/stdout.log": "stdout apple\nstdout pear 1\nstdout last\n"},
    ),
    "streams to both": Row(
        "--nproc-per-node 2 --log-dir CWD/logs -t 1 --role trainer prints.py",
        rounds=(),
        out=tuple(
            sorted(
                f"[trainer{rank}]:stdout {word}"
                for rank in range(2)
                for word in ("apple", f"pear {rank}", "last")
            )
        ),
        files={
            f"{rank}/stdout.log": f"stdout apple\nstdout pear {rank}\nstdout last\n"
            for rank in range(2)
        },
    ),
    "streams with a prefix of one's own": Row(
        "--log-dir CWD/logs -t 1 prints.py",
        env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name}.${local_rank}.${rank}> "},
        rounds=(),
        out=tuple(f"<default.0.0> stdout {word}" for word in ("apple", "last", "pear 0")),
    ),
    "streams of one rank to the console": Row(
        "--nproc-per-node 2 --local-ranks-filter 1 prints.py",
        rounds=(),
        out=("stdout apple", "stdout last", "stdout pear 1"),
    ),
    "lines that are copied": Row(
        "--nproc-per-node 2 --log-dir CWD/logs -t 3 --duplicate-stdout-filters apple,pear "
        "--duplicate-stderr-filters last prints.py",
        rounds=(),
        files={
            "filtered_stdout.log": "[default0]:stdout apple\n[default0]:stdout pear 0\n"
            "[default1]:stdout apple\n[default1]:stdout pear 1\n",
            "filtered_stderr.log": "[default0]:stderr last\n[default1]:stderr last\n",
        },
    ),
    "streams to both, and lines that are copied": Row(
        "--nproc-per-node 2 --log-dir CWD/logs -t 3 --role trainer "
        "--duplicate-stdout-filters apple,pear --duplicate-stderr-filters last prints.py",
        rounds=(),
        out=tuple(
            sorted(
                f"[trainer{rank}]:stdout {word}"
                for rank in range(2)
                for word in ("apple", f"pear {rank}", "last")
            )
        ),
        files={
            "1/stdout.log": "stdout apple\nstdout pear 1\nstdout last\n",
            "filtered_stdout.log": "[trainer0]:stdout apple\n[trainer0]:stdout pear 0\n"
            "[trainer1]:stdout apple\n[trainer1]:stdout pear 1\n",
            "filtered_stderr.log": "[trainer0]:stderr last\n[trainer1]:stderr last\n",
        },
    ),
    "a stream to files, the other of one rank to the console": Row(
        "--nproc-per-node 2 --log-dir CWD/logs -r 2 --local-ranks-filter 1 prints.py",
        rounds=(),
        out=("stdout apple", "stdout last", "stdout pear 1"),
        files={
            f"{rank}/stderr.log": f"stderr apple\nstderr pear {rank}\nstderr last\n"
            for rank in range(2)
        },
    ),
    "no files at all": Row("--log-dir /dev/null report.py"),
    # ── several agents ───────────────────────────────────────────────────────────────────────────
    "two agents, static": Row(
        f"--node-rank 0 --nproc-per-node 2 {_STATIC} report.py",
        (f"--node-rank 1 --nproc-per-node 1 {_STATIC} report.py",),
        rounds=(3,),
        env_is={"WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2", "MASTER_PORT": "PORT"},
        unlike=frozenset({"TORCHELASTIC_RUN_ID"}),
    ),
    "two agents, c10d, two roles": Row(
        "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:PORT "
        "--rdzv-id job --role a report.py",
        (
            "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:PORT "
            "--rdzv-id job --role b report.py",
        ),
        rounds=(4,),
        env_is={"WORLD_SIZE": "4", "ROLE_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job"},
        unlike=frozenset({"MASTER_ADDR", "MASTER_PORT", "ROLE_NAME"}),
    ),
    # ── with torch in the workers ────────────────────────────────────────────────────────────────
    "a sum": Row("--nproc-per-node 2 sum.py", rounds=(), out=("sum 2 True", "sum 2 True")),
}

QUICK = frozenset(
    {
        "default number of workers",
        "a script, the old spellings",
        "a program",
        "a module",
        "an elastic job of one node",
        "all of these at once",
        "an exception",
        "a signal",
        "a rank fails once",
        "no restart is left",
        "a program fails",
        "an error file",
        "streams to both, and lines that are copied",
        "a stream to files, the other of one rank to the console",
        "two agents, static",
    }
)
"""Rows for every run of the tests; the others are trials."""
