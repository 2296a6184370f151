"""elaunch: a launcher and elastic supervisor for distributed PyTorch training.

What a script may import is loaded when it is first asked for, so that the commands stay quick and a
script pays for what it uses. ``__init__.pyi`` is the same list for type checkers.
"""

import importlib

__version__ = "0.1.0"

_WHERE = {
    "init": "elaunch.training.context",
    "Context": "elaunch.training.context",
    "Info": "elaunch.training.launch",
    "info": "elaunch.training.launch",
    "latest_checkpoint": "elaunch.training.launch",
    "DistributedContext": "elaunch.training.distributed",
    "KeyStore": "elaunch.training.stores.keystore",
    "PreemptContext": "elaunch.training.preempt.preempt",
    "TrainContext": "elaunch.training.train",
    "Steps": "elaunch.training.steps.loop",
    "Step": "elaunch.training.steps.step",
    "read_metrics": "elaunch.training.metrics.reading",
    "CheckpointContext": "elaunch.training.checkpoint.context",
    "SaveHandle": "elaunch.training.checkpoint.handle",
    "Committed": "elaunch.checkpoint.records",
    "Keep": "elaunch.checkpoint.records",
    "ElasticDistributedSampler": "elaunch.training.sampler",
    "record": "elaunch.errorrecord",
    "run": "elaunch.torchrun.calls",
    "PerRank": "elaunch.training.checkpoint.state.perrank",
    "rng_state": "elaunch.training.checkpoint.state.perrank",
    "ElaunchError": "elaunch.errors",
    "ScriptError": "elaunch.errors",
    "ContextError": "elaunch.errors",
    "PlacementError": "elaunch.errors",
    "MetricError": "elaunch.errors",
    "CheckpointError": "elaunch.errors",
    "SaveError": "elaunch.errors",
    "RunDirError": "elaunch.errors",
    "SamplerError": "elaunch.errors",
    "NotFiniteError": "elaunch.errors",
    "BitsDifferError": "elaunch.errors",
    "CollectiveError": "elaunch.errors",
    "CollectiveTimeout": "elaunch.errors",
    "PeerLost": "elaunch.errors",
}

__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> object:
    """Import what is asked for (PEP 562); AttributeError for what elaunch does not have."""
    if name not in _WHERE:
        raise AttributeError(f"module 'elaunch' has no attribute {name!r}")
    found = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
