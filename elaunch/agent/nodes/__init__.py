"""This agent as one node of its job.

``standalone`` prepares what the only node of a job needs: its own coordinator. For a job of several
``connect`` prepares the way to the others, and ``store`` opens the store in which the agents meet,
with the key that agents of Slurm share (``mungekey``). ``status`` publishes how this node is and
logs what failed elsewhere. The coordinator is in ``elaunch.rendezvous``.
"""

__all__ = ["connect", "standalone", "status"]
