"""Checkpoints of every kind that is known: is this one whole?

One module for each format, which reads enough to tell a torn file from a whole one and runs nothing
of what it reads; ``own`` is elaunch's own. ``archives`` and ``pickles`` read single files.
"""

__all__ = [
    "accelerate",
    "archives",
    "dcp",
    "deepspeed",
    "filetree",
    "huggingface",
    "lightning",
    "own",
]
