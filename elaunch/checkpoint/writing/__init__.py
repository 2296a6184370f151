"""What a save writes beside the files themselves, and how fast.

What each rank wrote is in its manifest (``manifests``), and ``assemble`` makes the checkpoint's
documents of them all. ``pace`` is the speed at which a shard is written beside a training.
"""

__all__ = ["assemble", "manifests", "pace"]
