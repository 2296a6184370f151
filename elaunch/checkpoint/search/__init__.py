"""Where checkpoints are, and which of them is the newest that is complete.

``locations`` reads the texts of a user: where checkpoints are, which names of them count, where a
script's arguments ask for one. ``latest`` looks from the newest down until one is whole,
``elsewhere`` is for a checkpoint that a user names.
"""

__all__ = ["elsewhere", "latest", "locations"]
