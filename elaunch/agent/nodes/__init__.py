"""This agent as one node of a job of several.

``connect`` prepares what such a job needs, ``store`` opens the store in which the agents meet,
with the key that agents of Slurm share (``mungekey``), and ``status`` publishes how this node is
and logs what failed elsewhere. The coordinator is in ``elaunch.rendezvous``.
"""

__all__ = ["connect", "status"]
