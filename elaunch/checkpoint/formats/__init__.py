"""Checkpoints of every kind that is known: is this one whole?

One module for each format, which reads enough to tell a torn file from a whole one and runs nothing
of what it reads. ``directories`` tells whose format a directory has; ``own`` is elaunch's own.
"""

__all__ = [
    "accelerate",
    "dcp",
    "deepspeed",
    "directories",
    "filetree",
    "huggingface",
    "lightning",
    "own",
    "safetensors",
    "torchfile",
]
