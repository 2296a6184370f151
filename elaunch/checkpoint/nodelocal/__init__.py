"""Checkpoints where every node has a directory of its own.

``inventory`` is what one node has and which of it is whole, and what the copies of one checkpoint
on several nodes make together, ``seals`` the manifests that the nodes send each other between two
rounds.
"""

__all__ = ["inventory", "seals"]
