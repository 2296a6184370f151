"""``elaunch wrap``: one rank of another launcher's job, below a server of its own.

``plan`` decides everything before anything starts: rank, variables, log files. ``run`` does it.
"""

__all__ = ["plan", "run"]
