"""The launcher that has started this process, and the rank and size that it gives.

``table`` holds the variables of torchrun, mpirun, srun and others; ``meetingpoint`` is where ranks
meet whose launcher hosts no store; ``ranks`` checks the six numbers of a rank and derives those
that follow.
"""

__all__ = ["meetingpoint", "ranks", "table"]
