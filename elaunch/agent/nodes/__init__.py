"""This agent as one node of its job.

``status`` publishes how this node is and logs what failed elsewhere. For a job of several nodes
``connect`` prepares the way to the others, and ``store`` opens the store in which the agents meet,
with the key that agents of Slurm share (``elaunch.rendezvous.munge``). The coordinator is in
``elaunch.rendezvous``.
"""

__all__ = ["connect", "status"]
