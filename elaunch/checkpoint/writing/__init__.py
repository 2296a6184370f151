"""The documents of a checkpoint, and the pace of a write.

Each rank lists its files in its manifest (``manifests``); ``assemble`` makes the checkpoint's
documents of all manifests. ``pace`` is the speed at which a shard is written beside a training.
"""

__all__ = ["assemble", "manifests", "pace"]
