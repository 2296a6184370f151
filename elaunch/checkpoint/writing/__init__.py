"""From shards in memory to a checkpoint that readers see, in the background.

``queue`` writes shards and commits the stage when all have come; ``inflight`` knows which have,
``pace`` how hard to push the disk. What each rank wrote is in its manifest (``manifests``), and
``assemble`` makes the checkpoint's documents of them all.
"""

__all__ = ["assemble", "manifests", "pace", "queue"]
