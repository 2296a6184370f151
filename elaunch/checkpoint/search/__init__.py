"""Where checkpoints are, and which of them is the newest that is complete.

``places`` reads a text that names a place, ``candidates`` and ``globs`` find which names in it can
be checkpoints, ``latest`` looks from the newest down until one is whole. ``elsewhere`` is for a
checkpoint that a user names.
"""

__all__ = ["candidates", "elsewhere", "globs", "latest", "placeholder", "places"]
