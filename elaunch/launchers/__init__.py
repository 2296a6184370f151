"""The launcher that has started this process, and the rank and size that it gives.

``table`` holds the variables of torchrun, mpirun, srun and others; ``ranks`` checks the six numbers
of a rank, derives those that follow, and finds where ranks meet whose launcher hosts no store.
"""

__all__ = ["ranks", "table"]
