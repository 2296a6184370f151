"""The documents of a checkpoint.

Each rank lists its files in its manifest (``manifests``); ``assemble`` makes the checkpoint's
documents of all manifests.
"""

__all__ = ["assemble", "manifests"]
