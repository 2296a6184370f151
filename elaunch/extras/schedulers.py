"""The files that each scheduler reads of a job.

============  ===================================================================================
target        is (docs/schedulers.md)
============  ===================================================================================
slurm         a batch script: one agent on each node, asked to save before the time limit, and
              queued again when it ends with 75
kubernetes    an indexed Job, with a headless Service where there are several nodes
jobset        a JobSet with one such Job
kubeflow      a TrainingRuntime and a TrainJob of Kubeflow Trainer
============  ===================================================================================

In the last three a pod that ends with 75, or that is evicted, is replaced without being counted.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from elaunch.config.flags.flag import Answers
from elaunch.endings import KILLED, PREEMPTED
from elaunch.errors import JoinTimeoutError, ServerError, StoreError, UsageError

PORT: Final = 29400
MARGIN_S: Final = 15
"""Seconds of the lead in which the agent ends what has not saved, and itself."""
SLURM_LEAD_S: Final = 65_535
"""Seconds before the limit at which Slurm can send a signal, at the most (sbatch(1))."""
SLURM_EARLY_S: Final = 60
"""Seconds by which Slurm may send it too early (the same page)."""
CONTAINER: Final = "node"
TRAINER: Final = "trainer.kubeflow.org/v1alpha1"
_AGAIN: Final = sorted(
    {StoreError.exit_code, ServerError.exit_code, JoinTimeoutError.exit_code, PREEMPTED}
    | {KILLED, 128 + 15}
)
"""Exit codes after which another pod may do better; all others are the script's, or a mistake."""
_ENDPOINT: Final = "--rdzv-endpoint=$host:$port"

Document = Mapping[str, Any]


@dataclass(frozen=True)
class ScheduledJob:
    """The job of which the files for every target are made.

    ``flags`` and ``command`` are words of ``elaunch run``, without the size and the meeting point,
    which ``answers`` have; ``lead`` is the seconds between the request to save and the end.
    """

    name: str
    answers: Answers
    flags: tuple[str, ...]
    command: tuple[str, ...]
    image: str
    gpus: int
    limit: int
    lead: int
    claim: str

    @property
    def least(self) -> int:
        """The least number of nodes."""
        return int(self.answers["nnodes"][0])

    @property
    def most(self) -> int:
        """The greatest number of nodes."""
        return int(self.answers["nnodes"][1])

    @property
    def through_etcd(self) -> bool:
        """Whether the nodes meet in an etcd that is named."""
        return bool(self.answers["rdzv-backend"] == "etcd")

    def meeting(self, endpoint: str, run_id: str) -> list[str]:
        """Return the flags for run and meeting point; ``endpoint`` is where node 0 is, or ""."""
        asked = self.answers
        flags = [
            f"--nproc-per-node={asked['nproc-per-node']}",
            f"--rdzv-id={asked['rdzv-id'] or run_id}",
        ]
        if self.through_etcd:
            flags += ["--rdzv-backend=etcd", f"--rdzv-endpoint={asked.given['rdzv-endpoint'].text}"]
        elif self.most == 1:
            # A pod's name, which Kubeflow gives by PET_MASTER_ADDR, need not resolve yet.
            return [*flags, "--standalone", "--master-addr=127.0.0.1"]
        elif endpoint:
            flags += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
        else:
            return flags
        nodes = f"{self.least}" if self.least == self.most else f"{self.least}:{self.most}"
        return [f"--nnodes={nodes}", *flags]


def slurm(job: ScheduledJob) -> str:
    """Return a batch script.

    Raises UsageError where Slurm would refuse its lead, or send the signal at the very start.
    """
    _check_lead(job)
    nodes = f"{job.least}" if job.least == job.most else f"{job.least}-{job.most}"
    lead, left = job.lead, job.lead - MARGIN_S
    given = [
        # Without it, Slurm may bind the one task of a node, with all its workers, to one CPU.
        *("job-name=" + job.name, "nodes=" + nodes, "ntasks-per-node=1", "exclusive"),
        *([f"gpus-per-node={job.gpus}"] if job.gpus else []),
        *([f"time={-(-job.limit // 60)}"] if job.limit else []),
        *(f"signal=B:USR1@{job.lead}", "requeue", "open-mode=append"),
    ]
    head = "".join(f"#SBATCH --{one}\n" for one in given)
    meeting = job.meeting("$host:$port", "$SLURM_JOB_ID")
    words = [*map(_in_shell, meeting), *map(shlex.quote, job.flags)]
    words += [shlex.join(job.command)] if job.command else []
    run_id = _in_shell(job.answers["rdzv-id"] or "$SLURM_JOB_ID")
    started = " \\\n    ".join(["srun --kill-on-bad-exit=0 elaunch run", *words])
    return f"""\
#!/bin/bash
{head}
# Slurm sends USR1 here {lead} s before the time limit: the job saves, and ends with {PREEMPTED}.
ask() {{
    asked=yes
    elaunch preempt --deadline {left} --reason "the time limit of the Slurm job" -- {run_id}
}}
trap ask USR1

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
{started} &
step=$!
while
    asked=
    wait "$step"
    code=$?
    [ -n "$asked" ]  # the signal has ended the wait, not the step
do :; done

# {PREEMPTED}: it has saved, and is to be continued.
[ "$code" -eq {PREEMPTED} ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
"""


def _check_lead(job: ScheduledJob) -> None:
    if job.lead > SLURM_LEAD_S:
        raise UsageError(f"--lead: {job.lead} s: Slurm takes up to {SLURM_LEAD_S}")
    if job.limit and job.lead + SLURM_EARLY_S >= job.limit:
        raise UsageError(
            f"--lead: {job.lead} s, and {SLURM_EARLY_S} by which Slurm may be early, are not "
            f"shorter than --time, {job.limit} s: the job would be asked to save as soon as it "
            "starts, and again each time that it is requeued"
        )


def kubernetes(job: ScheduledJob) -> list[Document]:
    """Return an indexed Job, and the Service that gives its pods names."""
    meeting = job.meeting(f"{job.name}-0.{job.name}:{PORT}", job.name)
    spec = _job_spec(job, _pod(job, meeting))
    made = _object("batch/v1", "Job", job.name, spec)
    if job.most == 1:
        return [made]
    spec["template"]["spec"]["subdomain"] = job.name
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": job.name},
    }
    return [_object("v1", "Service", job.name, service), made]


def jobset(job: ScheduledJob) -> list[Document]:
    """Return a JobSet of one Job."""
    meeting = job.meeting(f"{job.name}-{CONTAINER}-0-0.{job.name}:{PORT}", job.name)
    spec = _job_spec(job, _pod(job, meeting))
    network = {
        "enableDNSHostnames": True,
        "publishNotReadyAddresses": True,
        "subdomain": job.name,
    }
    jobs = [{"name": CONTAINER, "replicas": 1, "template": {"spec": spec}}]
    made = {"network": network, "replicatedJobs": jobs}
    return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", job.name, made)]


def kubeflow(job: ScheduledJob) -> list[Document]:
    """Return a TrainingRuntime and a TrainJob; the nodes meet where PET_* variables say."""
    if job.least != job.most:
        raise UsageError("--nnodes: a TrainJob has a fixed number of nodes; give one number")
    pod = _pod(job, job.meeting("", job.name))
    (container,) = pod["containers"]
    trainer = {"numNodes": job.most}
    trainer |= {name: container[name] for name in ("image", "command", "args")}
    if "resources" in container:
        trainer["resourcesPerNode"] = container["resources"]
    spec = {
        name: value
        for name, value in _job_spec(job, pod).items()
        if name not in ("completionMode", "completions", "parallelism", "activeDeadlineSeconds")
    }
    step = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    jobs = [{"name": CONTAINER, "template": {"metadata": step, "spec": spec}}]
    runtime = {
        "mlPolicy": {"numNodes": job.most, "torch": {}},
        "template": {"spec": {"replicatedJobs": jobs}},
    }
    made: dict[str, Any] = {
        "runtimeRef": {
            "apiGroup": TRAINER.partition("/")[0],
            "kind": "TrainingRuntime",
            "name": job.name,
        },
        "trainer": trainer,
    }
    if job.limit:
        made["activeDeadlineSeconds"] = job.limit
    return [
        _object(TRAINER, "TrainingRuntime", job.name, runtime),
        _object(TRAINER, "TrainJob", job.name, made),
    ]


def _object(version: str, kind: str, name: str, spec: Document) -> Document:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _job_spec(job: ScheduledJob, pod: Document) -> dict[str, Any]:
    """Return what a Job, a JobSet and a TrainingRuntime have alike."""
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _codes("In", [PREEMPTED])},
        {"action": "FailJob", "onExitCodes": _codes("NotIn", _AGAIN)},
    ]
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.most,
        "parallelism": job.most,
        "backoffLimit": 3 * job.most,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": dict(pod)},
    }
    if job.least < job.most:  # a pod that finds no place, or no job any more, is not missed
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    if job.limit:
        spec["activeDeadlineSeconds"] = job.limit
    return spec


def _codes(operator: str, codes: Sequence[int]) -> Document:
    return {"containerName": CONTAINER, "operator": operator, "values": list(codes)}


def _pod(job: ScheduledJob, meeting: Sequence[str]) -> Document:
    flags = [*meeting, *job.flags, *_shutdown(job)]
    volumes: list[Document] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if job.claim:
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": job.claim}})
        where = job.answers["checkpoint-dir"]
        mounts.append({"name": "checkpoints", "mountPath": where})
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": job.image,
        "command": ["elaunch", "run"],
        # $(NAME) is a variable to Kubernetes; $$ is a dollar.
        "args": [word.replace("$", "$$") for word in (*flags, *job.command)],
        "volumeMounts": mounts,
    }
    if job.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.gpus}}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.lead,
        "containers": [container],
        "volumes": volumes,
    }


def _shutdown(job: ScheduledJob) -> list[str]:
    """Return the flag by which the agent ends its workers before the kubelet ends the agent."""
    answers, own = job.answers, job.answers.is_set("shutdown-timeout")
    seconds = answers["shutdown-timeout"] if own else job.lead - MARGIN_S
    grace = answers["sibling-grace"]
    if not answers.is_set("sibling-grace"):
        grace = min(grace, seconds)
    if seconds + grace > job.lead:
        name, other = "shutdown-timeout", f"--sibling-grace, {grace:g} s"
        if not own:
            name, other = "sibling-grace", f"--shutdown-timeout, {seconds:g} s"
        longer = math.ceil((seconds if own else MARGIN_S) + grace)
        why = f"and {other}, are longer than --lead, {job.lead} s: the kubelet kills the agent"
        raise answers.fault(name, why, f"give a shorter time, or --lead {longer}")
    return [] if own else [f"--shutdown-timeout={seconds}"]


TARGETS: Mapping[str, Callable[[ScheduledJob], str | list[Document]]] = {
    target.__name__: target for target in (slurm, kubernetes, jobset, kubeflow)
}


def _in_shell(word: str) -> str:
    """Quote a word, but for the endpoint that the script sets, and Slurm's number at its end."""
    head, equals, tail = word.rpartition("=")
    if tail != "$SLURM_JOB_ID" and word != _ENDPOINT:
        return shlex.quote(word)
    return f'{shlex.quote(head)}{equals}"{tail}"' if equals else f'"{tail}"'


def to_yaml(documents: Sequence[Document]) -> str:
    """Return documents in which every text is quoted: no reader takes one for something else."""
    import yaml

    class Quoting(yaml.SafeDumper):
        """Writes values in double quotes, keys without."""

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"')

    def mapping(dumper: yaml.SafeDumper, value: Document) -> yaml.Node:
        node = dumper.represent_mapping("tag:yaml.org,2002:map", value)
        for key, _ in node.value:
            key.style = None
        return node

    Quoting.add_representer(str, text)
    Quoting.add_representer(dict, mapping)
    Quoting.ignore_aliases = lambda *_: True  # type: ignore[method-assign]
    return yaml.dump_all(
        documents, Dumper=Quoting, sort_keys=False, width=1 << 20, explicit_start=True
    )
