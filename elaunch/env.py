"""Every variable between the agent and its workers; nothing else in elaunch names them.

==============================  ====================================================================
variable                        value
==============================  ====================================================================
torchrun's                      RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK,
                                GROUP_WORLD_SIZE, ROLE_NAME, ROLE_RANK, ROLE_WORLD_SIZE,
                                MASTER_ADDR, MASTER_PORT, TORCHELASTIC_*,
                                TORCH_NCCL_ASYNC_ERROR_HANDLING
GLOO_SOCKET_IFNAME,             the interface on the route to the other nodes, where these are not
NCCL_SOCKET_IFNAME              set and it is known
ELAUNCH_RUN_ID                  the run's id; equal to TORCHELASTIC_RUN_ID
ELAUNCH_ROUND                   0 at the first start, one more at each restart
ELAUNCH_RESTART_REASON          why this round began; empty in round 0
ELAUNCH_NODE_ADDRS              addresses of all nodes in the order of their node ranks, by comma;
                                empty where that is longer than 100,000 bytes
ELAUNCH_AGENT_SOCKET            path of this node's agent's Unix socket
ELAUNCH_CHECKPOINT_DIR          ``--checkpoint-dir``, absolute, or its URL; unset without it
ELAUNCH_CHECKPOINT_LOCAL        ``1`` with ``--checkpoint-local``; unset without it
ELAUNCH_RUN_ID_GIVEN            ``1`` where a person chose the run id and there is a
                                ``--checkpoint-dir``: a later start has the same id; else unset
ELAUNCH_CHECKPOINT_KEEP         the ``--checkpoint-keep-…`` flags as JSON; unset without any
ELAUNCH_RESUME_FROM             the checkpoint that every rank of this round resumes from, or empty
ELAUNCH_RESUME_STEP             its step, or empty
ELAUNCH_RESUME_UUID             its uuid, if the agents have it in memory and still write it; else
                                unset
ELAUNCH_INIT_FROM               the checkpoint of ``--init-from``, from which the run begins at
                                step 0 while it has none of its own; unset without it
ELAUNCH_HPARAMS                 ``hyperparameters`` of the job file as JSON; unset without them
ELAUNCH_PRESENT                 the ranks that go on from the round before, as 0,1,3, where this
                                worker follows one that was lost; else unset
ELAUNCH_CHANNEL_KEY             key by which the round's workers know each other, as hex; not set
                                where several nodes have no secret (docs/rendezvous.md)
ELAUNCH_STARTER                 process that has started ``elaunch wrap``, as pid and tick; set by
                                it where no launcher names the job
ELAUNCH_STACKS_FILE             where the worker writes its stacks at a signal; with --hang-timeout
ELAUNCH_SERVER                  set for an agent alone: pid of a child that is to be its server,
                                started before the agent's other parts (elaunch.agent.startup) or
                                a fork of the program that has started the agent
                                (elaunch.torchrun), and the number of the file that leads there,
                                as 4711:5
TORCHELASTIC_TIMER_FILE         the pipe of torch's timers; with TORCHELASTIC_ENABLE_FILE_TIMER=1
==============================  ====================================================================

torchrun's names and value formats are those of torch 2.15, ``torch/distributed/elastic/agent/
server/local_elastic_agent.py``. One value differs on purpose: ``TORCHELASTIC_USE_AGENT_STORE`` is
``1``, which lets a script host a store of its own (docs/torchrun.md).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Final, NamedTuple

STATE_HOME = "XDG_STATE_HOME"
OMP_NUM_THREADS = "OMP_NUM_THREADS"
KUBEFLOW_URL = "KUBEFLOW_TRAINER_SERVER_URL"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
LOG_PREFIX_TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
HIP_DEVICES = "HIP_VISIBLE_DEVICES"
"""AMD's name for the same; where both are set, ROCm goes by this one."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
NCCL_ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
TEMP_PREFIX = "elaunch-"
"""How the name of a run's own TMPDIR begins."""
SCRATCH: Final = "scratch-"
"""Kind of a temporary directory that has only what elaunch itself has put there."""
CACHE_PREFIX = "torchinductor_"
"""How the name of TorchInductor's cache begins, and that of the link to it in that TMPDIR."""
AGENT_SOCKET = "ELAUNCH_AGENT_SOCKET"
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
CHANNEL_KEY = "ELAUNCH_CHANNEL_KEY"
CHECKPOINT_DIR = "ELAUNCH_CHECKPOINT_DIR"
OPEN_MPI_RANK = "OMPI_COMM_WORLD_RANK"
OPEN_MPI_SECRET = "OMPI_MCA_orte_precondition_transports"
"""A random number that mpirun of Open MPI 4 gives to the processes of a job, and to no other."""
RESUME_UUID = "ELAUNCH_RESUME_UUID"
PRESENT = "ELAUNCH_PRESENT"
RUN_ID_GIVEN = "ELAUNCH_RUN_ID_GIVEN"
CHECKPOINT_LOCAL = "ELAUNCH_CHECKPOINT_LOCAL"
CHECKPOINT_KEEP = "ELAUNCH_CHECKPOINT_KEEP"
INIT_FROM = "ELAUNCH_INIT_FROM"
KEEP_RUNS = "ELAUNCH_KEEP_RUNS"
"""A flag's variable, which scripts that track a run without an agent read, too."""
HPARAMS = "ELAUNCH_HPARAMS"
STARTER = "ELAUNCH_STARTER"
STACKS_FILE = "ELAUNCH_STACKS_FILE"
SERVER = "ELAUNCH_SERVER"
TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
FACTS = frozenset(
    {
        *(AGENT_SOCKET, CHANNEL_KEY, CHECKPOINT_DIR, RUN_ID_GIVEN, CHECKPOINT_LOCAL),
        *(CHECKPOINT_KEEP, STACKS_FILE, TIMER_FILE, "ELAUNCH_RUN_ID", "ELAUNCH_ROUND"),
        *("ELAUNCH_RESTART_REASON", "ELAUNCH_NODE_ADDRS", "ELAUNCH_RESUME_FROM"),
        *("ELAUNCH_RESUME_STEP", RESUME_UUID, PRESENT, HPARAMS, INIT_FROM),
    }
)
"""Variables that an agent sets for its own workers alone: they mean nothing to another job."""
HANDLED_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""Those of --signals-to-handle by default, as with torchrun."""
MAX_ADDRS = 100_000
"""Bytes of ELAUNCH_NODE_ADDRS: no program is started with a variable of 128 KiB (execve(2))."""
STACKS_SIGNAL = signal.SIGRTMIN + 12
"""At this signal a worker writes the stacks of its threads to its STACKS_FILE."""
DEBUG_SIGNAL = signal.SIGRTMIN + 13
"""At this signal a forked worker runs a debugger for the command that listens for it."""


class NodePlace(NamedTuple):
    """Where one node stands in a round of the job.

    Nodes may have different numbers of workers, so ranks are counted up node by node.
    ``first_rank`` is that of this node's first worker, ``first_role_rank`` the same among the
    workers of its role; ``addrs`` are the nodes' addresses by node rank.
    """

    node_rank: int
    addrs: tuple[str, ...]
    first_rank: int
    world_size: int
    first_role_rank: int
    role_world_size: int

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return len(self.addrs)


def only_node(addr: str, nproc: int) -> NodePlace:
    """Return the place of a node that is the whole job."""
    return NodePlace(0, (addr,), 0, nproc, 0, nproc)


class RoundFacts(NamedTuple):
    """Values that every worker of one round on this node gets in its environment."""

    run_id: str
    round: int = 0
    restarts: int = 0
    max_restarts: int = 0
    reason: str = ""
    local_world_size: int = 1
    role: str = "default"
    place: NodePlace = NodePlace(0, ("",), 0, 1, 0, 1)
    master_addr: str = ""
    master_port: int = 0
    agent_socket: str = ""
    checkpoint_dir: str | None = None
    resume_from: str = ""
    resume_step: str = ""
    signals_to_handle: str = ""
    use_agent_store: str = ""
    virtual_local_rank: bool = False
    channel_key: str = ""
    run_id_given: bool = False
    checkpoint_local: bool = False
    checkpoint_keep: str = ""
    init_from: str = ""
    resume_uuid: str = ""


def worker_environment(
    facts: RoundFacts, local_rank: int, error_file: str, launcher: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that elaunch sets for one worker, on top of the launcher's own.

    Args:
        facts: the round's facts, equal for all workers of this node.
        local_rank: 0 … ``facts.local_world_size - 1``.
        error_file: where the worker writes its error record (torch's ``@record``).
        launcher: the environment that elaunch was started with.
    """
    place = facts.place
    variables = {
        "LOCAL_RANK": str(local_rank),
        "RANK": str(place.first_rank + local_rank),
        "GROUP_RANK": str(place.node_rank),
        "ROLE_RANK": str(place.first_role_rank + local_rank),
        "ROLE_NAME": facts.role,
        "LOCAL_WORLD_SIZE": str(facts.local_world_size),
        "WORLD_SIZE": str(place.world_size),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_WORLD_SIZE": str(place.role_world_size),
        "MASTER_ADDR": facts.master_addr,
        "MASTER_PORT": str(facts.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(facts.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(facts.max_restarts),
        "TORCHELASTIC_RUN_ID": facts.run_id,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": facts.signals_to_handle,
        AGENT_STORE: facts.use_agent_store,
        NCCL_ASYNC_ERRORS: launcher.get(NCCL_ASYNC_ERRORS, "1"),
        ERROR_FILE: error_file,
        "ELAUNCH_RUN_ID": facts.run_id,
        "ELAUNCH_ROUND": str(facts.round),
        "ELAUNCH_RESTART_REASON": facts.reason,
        "ELAUNCH_NODE_ADDRS": _addresses(place.addrs),
        AGENT_SOCKET: facts.agent_socket,
        "ELAUNCH_RESUME_FROM": facts.resume_from,
        "ELAUNCH_RESUME_STEP": facts.resume_step,
    }
    variables |= _only_where_given(facts)
    if facts.virtual_local_rank:
        variables["LOCAL_RANK"] = "0"
        names = {VISIBLE_DEVICES, visible_devices(launcher)}
        variables |= dict.fromkeys(names, _visible_device(launcher, local_rank))
    return variables


def _addresses(addrs: tuple[str, ...]) -> str:
    listed = ",".join(addrs)
    return listed if len(listed) <= MAX_ADDRS else ""


def _only_where_given(facts: RoundFacts) -> dict[str, str]:
    """Return the variables that are unset where a flag is not given."""
    given = {
        CHECKPOINT_DIR: facts.checkpoint_dir,
        RUN_ID_GIVEN: "1" if facts.checkpoint_dir is not None and facts.run_id_given else None,
        CHECKPOINT_LOCAL: "1" if facts.checkpoint_local else None,
        CHECKPOINT_KEEP: facts.checkpoint_keep or None,
        INIT_FROM: facts.init_from or None,
        RESUME_UUID: facts.resume_uuid or None,
        CHANNEL_KEY: facts.channel_key or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def named_devices(value: str) -> list[str]:
    """Return the devices that a value of CUDA_VISIBLE_DEVICES names."""
    return [device.strip() for device in value.split(",") if device.strip()]


def visible_devices(environ: Mapping[str, str]) -> str:
    """Return the name of the variable that says which devices may be used."""
    return HIP_DEVICES if environ.get(HIP_DEVICES) else VISIBLE_DEVICES


def _visible_device(launcher: Mapping[str, str], local_rank: int) -> str:
    devices = named_devices(launcher.get(visible_devices(launcher), ""))
    return devices[local_rank] if devices else str(local_rank)


def default_omp_threads(environ: Mapping[str, str], nproc: int) -> dict[str, str]:
    """Return torchrun's rule: one OpenMP thread each where several workers share a node."""
    if nproc > 1 and OMP_NUM_THREADS not in environ:
        return {OMP_NUM_THREADS: "1"}
    return {}


def launcher_environment() -> dict[str, str]:
    """Return a copy of the environment that elaunch was started with.

    A worker of another job may have started elaunch: the facts of that job are left out. What
    torchrun sets, too, is set anew for each worker. What a person has exported reaches both jobs.
    """
    left_out = FACTS if AGENT_SOCKET in os.environ else {STACKS_FILE, RUN_ID_GIVEN}
    left_out = {*left_out, SERVER}
    return {name: value for name, value in os.environ.items() if name not in left_out}


def take_server() -> tuple[int, int] | None:
    """Return pid and file of a server that this agent was given, once; None without one."""
    pid, _, fd = os.environ.pop(SERVER, "").partition(":")
    return (int(pid), int(fd)) if fd else None
