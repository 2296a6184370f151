"""``save_ddp`` and ``load_ddp``: one ``torch.save`` file for all ranks, written by rank 0.

``singlefile`` is both calls, and puts a file's content back into a state. ``plainstate`` makes
plain values of a state, and asks before the commit whether torch will load them.
"""

__all__ = ["singlefile"]
