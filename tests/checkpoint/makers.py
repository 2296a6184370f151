"""Checkpoints on disk for the tests: written as the real programs write them.

What needs torch imports it inside the function; a test module that only needs the rest stays fast.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from elaunch.checkpoint import layout
from elaunch.checkpoint.storage.checksums import checksum_of

# Two ranks on the CPU: FSDP2 shards a model, DCP saves model and optimizer.
FSDP2_SCRIPT = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 8))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 16)).sum().backward()
optimizer.step()
weights, state = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/step_120")
dist.destroy_process_group()
os._exit(0)  # torch's own threads may abort a process that is being finalised
"""


def write_json(path: Path, document: object) -> None:
    """Write a JSON document."""
    path.write_text(json.dumps(document))


def own(
    root: Path,
    step: int = 120,
    round_: int = 0,
    *,
    run_id: str = "digits",
    ranks: Mapping[int, Mapping[str, bytes]] | None = None,
) -> Path:
    """Write a committed checkpoint in elaunch's own layout; ``ranks``: rank → its files."""
    path = root / layout.step_name(step, round_)
    path.mkdir(parents=True)
    ranks = ranks or {0: {"model.pt": b"weights" * 64}, 1: {"rank1/rng.bin": b"\x01" * 100}}
    for rank, files in ranks.items():
        entries = []
        for name, content in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
            checksum = checksum_of(path / name)
            entries.append({"path": name, "size": len(content), "checksum": checksum})
        manifest = {"schema": 1, "rank": rank, "host": "here", "files": entries}
        write_json(path / layout.manifest_name(rank), manifest)
    metadata = {"schema": 1, "step": step, "round": round_, "run_id": run_id}
    write_json(path / layout.METADATA, {**metadata, "world_size": len(ranks)})
    commit(path)
    return path


def commit(path: Path) -> None:
    """Write COMMIT for the manifests that are there."""
    manifests = {file.name: file.read_bytes() for file in path.glob("manifest.rank-*.json")}
    write_json(path / layout.COMMIT, {"schema": 1, "digest": layout.digest(manifests)})


def edit_json(path: Path, **changes: object) -> None:
    """Change keys of a JSON document; None removes the key."""
    document: dict[str, Any] = json.loads(path.read_text())
    document.update(changes)
    kept = {key: value for key, value in document.items() if value is not None}
    write_json(path, kept)


def safetensors(path: Path, tensors: Mapping[str, bytes] | None = None) -> Path:
    """Write a safetensors file with one-dimensional tensors of bytes."""
    tensors = {"weight": b"w" * 64, "bias": b"b" * 8} if tensors is None else tensors
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, content in tensors.items():
        offsets = [end, end + len(content)]
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": offsets}
        end += len(content)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))
    return path


def saved(path: Path, content: object = None) -> Path:
    """Write a file by torch.save; the default has tensors and a global_step of 120."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        content = {"global_step": 120, "state_dict": {"w": torch.ones(8, 8), "b": torch.ones(3)}}
    torch.save(content, path)
    return path


def dcp_directory(path: Path) -> Path:
    """Write a DCP directory by one process: tensors, a number, a nested dict."""
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"model": {"w": torch.ones(32, 32), "b": torch.ones(3)}, "step": 120, "lr": {"a": 0.1}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group: meant
        dcp.save(state, checkpoint_id=path)
    return path


def fsdp2_directory(folder: Path) -> Path:
    """Write ``folder/step_120`` by two processes with FSDP2 and DCP."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", FSDP2_SCRIPT]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder)], env=environ, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=110)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    return folder / "step_120"


def trainer(root: Path, step: int = 120, *, weights: bool = True) -> Path:
    """Write what a Trainer leaves in ``checkpoint-N``, but for torch's files."""
    path = root / f"checkpoint-{step}"
    path.mkdir(parents=True)
    write_json(path / "config.json", {"model_type": "tiny"})
    write_json(path / "trainer_state.json", {"global_step": step, "log_history": [{"loss": 1.5}]})
    if weights:
        safetensors(path / "model.safetensors")
    return path


def training_arguments(path: Path, ranks: object) -> None:
    """Write a Trainer's ``training_args.bin``: an object that holds how many ranks there were."""
    state = SimpleNamespace(num_processes=ranks)
    saved(path / "training_args.bin", SimpleNamespace(distributed_state=state))


def truncate(path: Path, size: int) -> None:
    """Cut a file to ``size`` bytes."""
    os.truncate(path, size)
