"""Known causes: one row per way to end."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from elaunch import errors
from elaunch.agent.failure import explain as causes
from elaunch.agent.failure.causes import TEXTS
from elaunch.agent.failure.explain import CAUSES, OF_COMMAND, Explanation
from elaunch.agent.failure.tracebacks import HANDLING, HEADER
from elaunch.endings import PREEMPTED
from tests.agent.histories import changed, left
from tests.tables import each

GIB = 1 << 30


def explain(exitcode: int, text: str = "", **known: Any) -> Explanation:
    """Return the cause of the end of a worker with ``exitcode``."""
    facts = {name: known.pop(name) for name in ("rank", "local_rank", "timer") if name in known}
    return causes.explain(changed(left(0, exitcode), **facts).exit, text, **known)


# Messages as torch, CUDA, NCCL, the kernel and Python write them. Those that a machine without GPUs
# can bring about are brought about in tests/integration/test_causes.py.
MESSAGES = {
    "E-CUDA-OOM": ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"],
    "E-HOST-MEMORY": [
        "RuntimeError: [enforce] DefaultCPUAllocator: can't allocate memory",
        "MemoryError",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8 TiB",
    ],
    "E-SHM-FULL": [
        "RuntimeError: unable to write to file </torch_123_4>",
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2>: No space left",
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.",
        "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-X (size 9637888)",
    ],
    "E-DATALOADER-KILLED": ["RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."],
    "E-DATALOADER-DIED": [
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Segmentation fault.",
        "RuntimeError: DataLoader worker (pid(s) 7, 8) exited unexpectedly",
    ],
    "E-DATALOADER-TIMEOUT": ["RuntimeError: DataLoader timed out after 5 seconds"],
    "E-CHECKPOINT-TORN": [
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central",
        "_pickle.UnpicklingError: pickle data was truncated",
        "EOFError: Ran out of input",
        '  File "/x/torch/_weights_only_unpickler.py", line 335, in load\nEOFError',
        "RuntimeError: Cannot use ``weights_only=True`` with files saved in the legacy .tar format",
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        "elaunch.errors.DamageError: step-00000040.r0: rank-0.bin has other bytes than its "
        "manifest",
    ],
    "E-WEIGHTS-ONLY": ["_pickle.UnpicklingError: Weights only load failed. This file can still be"],
    "E-CHECKPOINT-KEYS": ["RuntimeError: Error(s) in loading state_dict for Linear:"],
    "E-DISK-FULL": ["OSError: [Errno 28] No space left on device: '/ckpt/step_10.pt'"],
    "E-SAVE-CUT": [
        "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598",
        "RuntimeError: [enforce fail at inline_container.cc:863] . PytorchStreamWriter failed "
        "writing file data/0: file write failed",
        "RuntimeError: basic_ios::clear: iostream error",
    ],
    "E-QUOTA": ["OSError: [Errno 122] Disk quota exceeded"],
    "E-OPEN-FILES": ["OSError: [Errno 24] Too many open files"],
    "E-FILE-LIMIT": ["OSError: [Errno 27] File too large"],
    "E-READ-ONLY": ["OSError: [Errno 30] Read-only file system: '/data/x'"],
    "E-IO": ["OSError: [Errno 116] Stale file handle", "OSError: [Errno 5] Input/output error"],
    "E-PERMISSION": ["PermissionError: [Errno 13] Permission denied: '/data/x'"],
    "E-FILE-MISSING": ["FileNotFoundError: [Errno 2] No such file or directory: '/data/x'"],
    "E-IMPORT": ["ModuleNotFoundError: No module named 'einops'"],
    "E-IMPORT-HIDDEN": [
        "ImportError: cannot import name 'Random' from 'random' (/home/me/job/random.py)",
        "ImportError: cannot import name 'nn' from 'torch' (/home/me/torch.py)",
    ],
    "E-IMPORT-BROKEN": [
        "ImportError: cannot import name 'Randon' from 'random' (/usr/lib/python3.11/random.py)",
        "ImportError: cannot import name 'x' from 'torch' (/v/site-packages/torch/__init__.py)",
        "ImportError: libcudart.so.12: cannot open shared object file",
    ],
    "E-SYNTAX": ["SyntaxError: invalid syntax"],
    "E-LOCAL-RANK": ["train.py: error: unrecognized arguments: --local-rank=0"],
    "E-ARGUMENTS": ["train.py: error: unrecognized arguments: --epoch 3"],
    "E-MAIN-GUARD": ["An attempt has been made to start a new process before the"],
    "E-PICKLE": ["AttributeError: Can't get local object 'main.<locals>.Data'"],
    "E-PROCESS-LIMIT": [
        "RuntimeError: can't start new thread",
        "terminate called after throwing an instance of 'std::system_error'\n"
        "  what():  Resource temporarily unavailable",
    ],
    "E-THREAD-AT-EXIT": ["terminate called without an active exception"],
    "E-PORT-IN-USE": [
        "DistNetworkError: listen failed. EADDRINUSE, address already in use",
        "OSError: [Errno 98] Address already in use",
    ],
    "E-ADDRESS-FAMILY": ["OSError: [Errno 97] Address family not supported by protocol"],
    "E-DOWNLOAD": [
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', "
        "port=443): Max retries exceeded with url: /x (Caused by NewConnectionError: Connection "
        "refused)"
    ],
    "E-HOST-NAME": ["socket.gaierror: [Errno -2] Name or service not known"],
    "E-NETWORK-INTERFACE": [
        "RuntimeError: [enforce fail at device.cc] Unable to find address for: x"
    ],
    "E-COLLECTIVE-MISMATCH": [
        "[enforce fail at pair.cc:490] op.preamble.length <= op.nbytes. 8 vs 4"
    ],
    "E-DDP-UNUSED": ["RuntimeError: Expected to have finished reduction in the prior iteration"],
    "E-DDP-MODEL": [
        "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 4 params"
    ],
    "E-NO-PROCESS-GROUP": ["ValueError: Default process group has not been initialized"],
    "E-PROCESS-GROUP-TWICE": ["ValueError: trying to initialize the default process group twice!"],
    "E-NCCL-TIMEOUT": ["[rank0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"],
    "E-COLLECTIVE-TIMEOUT": ["RuntimeError: Timed out waiting 1800000ms for recv operation"],
    "E-RANKS-MISSING": [
        "torch.distributed.DistStoreError: wait timeout after 1000ms, keys: "
        "/default_pg/0//cpu//0/1",
        "DistStoreError: Timed out after 301 seconds waiting for clients. 1/2 clients joined.",
    ],
    "E-STORE-CONNECT": [
        "torch.distributed.DistNetworkError: The client socket has failed to connect"
    ],
    "E-GLOO-CONNECT": ["RuntimeError: Gloo connectFullMesh failed with … Connection refused"],
    "E-CONNECTION": [
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
    "E-PEER-LOST": [
        "RuntimeError: [gloo/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3",
        "RuntimeError: Connection reset by peer",
        "DistBackendError: NCCL error: ncclRemoteError: remote process exited",
    ],
    "E-DEVICE-ORDINAL": ["RuntimeError: CUDA error: invalid device ordinal"],
    "E-CUDA-FORK": ["RuntimeError: Cannot re-initialize CUDA in forked subprocess."],
    "E-GPU-FAILED": ["CUDA error: uncorrectable ECC error encountered"],
    "E-DEVICE-ASSERT": ["CUDA error: device-side assert triggered"],
    "E-GPU-KIND": ["CUDA error: no kernel image is available for execution on the device"],
    "E-CPU-BUILD": ["AssertionError: Torch not compiled with CUDA enabled"],
    "E-NO-GPU": ["RuntimeError: No CUDA GPUs are available"],
    "E-SHARED-GPU": ["Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 101c0"],
    "E-NCCL": ["torch.distributed.DistBackendError: NCCL error in: x.cpp, ncclSystemError"],
    "E-CUDA": ["RuntimeError: CUDA error: an illegal memory access"],
}


@each("code", [cause.code for rows in TEXTS.values() for cause in rows])
def test_texts(code: str) -> None:
    """After exit code 1 the exception tells the cause, and whether it is a victim's."""
    for text in MESSAGES[code]:
        found = explain(1, text=f"{HEADER}\n{text}")
        assert (found.code, found.victim) == (code, CAUSES[code].victim), text
        assert found.cause and "{" not in found.text


def test_what_a_text_names_is_in_the_sentence() -> None:
    """The module, the file; a hostile name is text."""
    missing = "FileNotFoundError: [Errno 2] No such file or directory: '/data/{x}'"
    assert ": /data/{x}." in explain(1, text=missing).cause
    assert "'einops' is not installed" in explain(1, text=MESSAGES["E-IMPORT"][0]).cause
    assert "is not there." in explain(1, text="FileNotFoundError: train.bin").cause


def test_a_victims_text_counts_in_an_exception_only() -> None:
    """A connection that was refused once, in a log line, was perhaps tried again."""
    line = MESSAGES["E-PEER-LOST"][0]
    assert explain(1, text=f"{HEADER}\n{line}").victim
    assert explain(1, text=f"{line}\nstep 3") == Explanation()
    assert explain(-6, text=f"terminate called …\n  what(): {line}").victim


def test_nccls_watchdog_ends_the_rank_whose_gpu_failed() -> None:
    """That is its own fault, and no other rank's, as a timeout is."""
    text = (
        "what():  [PG ID 0] Process group watchdog thread terminated with exception: CUDA error: "
    )
    frames = "\n".join(f"frame #{n}: c10d::ProcessGroupNCCL::Watchdog::run()" for n in range(40))
    for error, code in (
        ("an illegal memory access was encountered", "E-CUDA"),
        ("device-side assert triggered", "E-DEVICE-ASSERT"),
    ):
        found = explain(-6, text=f"terminate called after …\n  {text}{error}\n{frames}")
        assert (found.code, found.victim) == (code, False)
    assert explain(-6, text=f"terminate called after …\n{frames}").victim


def test_a_mismatch_accuses_nobody_by_itself() -> None:
    """gloo aborts the neighbour of the rank that sends another size, which may be in the right."""
    text = "what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4."
    found = explain(-6, text=f"terminate called after throwing an instance of …\n  {text}")
    assert (found.code, found.victim) == ("E-COLLECTIVE-MISMATCH", True)
    assert "may be the one in the right" in found.cause


@pytest.mark.parametrize(
    ("first", "between", "last", "code"),
    [
        (
            "ModuleNotFoundError: No module named 'apex'",
            HANDLING,
            "FileNotFoundError: x",
            "E-FILE-MISSING",
        ),
        (
            "FileNotFoundError: x",
            HANDLING,
            "RuntimeError: Connection reset by peer",
            "E-FILE-MISSING",
        ),
        ("FileNotFoundError: x", HANDLING, "RuntimeError: no data", "E-FILE-MISSING"),
        (
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.",
            "The above exception was the direct cause of the following exception:",
            "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly",
            "E-DATALOADER-KILLED",
        ),
    ],
)
def test_chained_exceptions(first: str, between: str, last: str, code: str) -> None:
    """The last counts before one that was being handled, a cause before its consequence."""
    text = f"{HEADER}\n{first}\n\n{between}\n\n{HEADER}\n{last}"
    assert explain(1, text=text).code == code


def test_the_codes_that_errors_are_made_with() -> None:
    """Each has its row, and each row that no worker's end shows is the code of an error."""
    made = {
        code
        for path in Path(errors.__file__).parent.rglob("*.py")
        if path.name not in ("causes.py", "explain.py")
        for code in re.findall(r'"(E(?:-[A-Z]+)+)"', path.read_text())
    }
    assert made <= CAUSES.keys()
    assert {cause.code for cause in causes.START} <= made
    assert {cause.code for cause in CAUSES.values() if cause.start} <= made


def test_every_error_of_elaunch_has_a_row() -> None:
    """By the exit code that the command ends with."""
    kinds = [errors.ElaunchError, *errors.ElaunchError.__subclasses__()]
    kinds.remove(errors.ScriptError)  # raised in a script, whose exit code is its own
    assert {kind.code: kind.exit_code for kind in kinds} == {
        cause.code: code for code, cause in OF_COMMAND.items() if code != PREEMPTED
    }
    assert len(CAUSES) >= 25
    assert all(re.fullmatch(r"E(-[A-Z]+)+", code) for code in CAUSES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SIGKILL", "killed from outside elaunch"),
        ("SIGTERM", "asked it to end"),
        ("SIGINT", "interrupted"),
        ("SIGHUP", "hung it up"),
        ("SIGBUS", "/dev/shm"),
        ("SIGSEGV", "Native code crashed"),
        ("SIGABRT", "Native code gave up"),
        ("SIGILL", "another CPU"),
        ("SIGFPE", "by zero"),
        ("SIGXCPU", "ulimit -t"),
        ("SIGUSR1", "--forward-signals"),
    ],
)
def test_signals(name: str, expected: str) -> None:
    """By signal, and by the exit code 128+n that a shell makes of it."""
    number = signal.Signals[name]
    assert expected in explain(-number).text
    shell = explain(128 + number).text
    assert shell.startswith(f"{128 + number} is 128 + {int(number)}: ")
    assert name in shell and expected in shell


def test_oom_kill_is_told_from_other_kills() -> None:
    """Only the cgroup's count makes it a fact."""
    assert explain(-9, oom_kill=True).text.startswith("Out of memory: the kernel killed it")
    assert "Out of memory" in explain(137, oom_kill=True).text
    assert "Out of memory" not in explain(-9, text="CUDA out of memory").text
    assert "Out of memory" not in explain(-11, oom_kill=True).text


def test_bus_error_tells_the_state_of_shared_memory() -> None:
    """Full, or not full any more now that the process is gone."""
    assert "2 MiB left. Give it more (docker run --shm-size" in explain(-7, shm_free=2 << 20).text
    assert "1024 MiB free now" in explain(-7, shm_free=GIB).text


def test_aborts() -> None:
    """The NCCL watchdog is not any C++ abort."""
    watchdog = "[rank0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"
    assert explain(-6, text=watchdog).victim
    assert "NCCL watchdog" in explain(-6, text="terminate … ProcessGroupNCCL").text
    assert "PYTHONFAULTHANDLER" in explain(-6, text="terminate called").text
    assert "PYTHONFAULTHANDLER" not in explain(-6, text="Fatal Python error: Aborted").text


@pytest.mark.parametrize(
    ("rank", "size", "hint"),
    [(5, 4, True), (4, 4, True), (3, 4, False), (5, None, False)],
)
def test_device_chosen_by_global_rank(rank: int, size: int | None, hint: bool) -> None:
    """torch.cuda.set_device(dist.get_rank()) works on the first node only."""
    text = "torch.AcceleratorError: CUDA error: invalid device ordinal"
    found = explain(1, text=text, rank=rank, local_rank=1, local_world_size=size).text
    assert 'int(os.environ["LOCAL_RANK"])' in found
    expected = (
        f"RANK is {rank} here, but this node's workers are 0 to 3; this one's LOCAL_RANK is 1"
    )
    assert (expected in found) is hint


@pytest.mark.parametrize(
    ("exitcode", "text", "expected"),
    [
        (1, "ValueError: boom", ""),
        (7, "Connection refused", ""),
        (-11, "Connection refused", "Native code crashed"),
        (-15, "No space left on device", "asked it to end"),
        (0, "", ""),
        (126, "", "not executable"),
        (127, "", "not found"),
        (120, "", "flush"),
        (255, "", ""),
        (128, "", ""),
        (-64, "", ""),
        (-70, "", ""),
    ],
)
def test_other_ends(exitcode: int, text: str, expected: str) -> None:
    """A text only counts where it can be the cause; nothing known gives no text."""
    found = explain(exitcode, text=text).text
    assert re.search(expected, found) and bool(found) is bool(expected)
