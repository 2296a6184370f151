"""``elaunch checkpoints``: what is in a directory, read and never changed.

``target`` finds out what the user means, ``view`` reads it, ``page`` lays it out.
"""

__all__ = ["page", "target", "view"]
